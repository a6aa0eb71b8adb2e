"""When checkpoints are written, and what happens when they cannot be; one process, real files."""

import errno
import os
import threading
import time

import pytest
import torch

import ddp_common as ddp
from ddp_common import checkpoint as module
from ddp_common.checkpoint_files import checkpoints, fault, step_of
from ddp_common.parts import copy_of


def train(directory, epochs=2, width=2, **options):
    """Train one process for `epochs` of ten steps; returns the checkpoint."""
    sampler = ddp.ElasticSampler(40, 4)
    checkpoint = ddp.Checkpoint(
        directory=directory, model=torch.nn.Linear(width, width), sampler=sampler, **options
    )
    checkpoint.restore()
    for _ in sampler.epochs(epochs):
        for _ in sampler.batches():
            checkpoint.step()
    checkpoint.wait()
    return checkpoint


def steps(directory):
    return [step_of(path) for path in checkpoints(directory)]


def test_every_k_steps_between_two_steps(tmp_path):
    train(tmp_path, every_steps=4, keep=9)
    assert steps(tmp_path) == [4, 8, 12, 16]


def test_the_end_of_an_epoch_belongs_to_the_next_one(tmp_path):
    """Between epochs a schedule may step: the file of step 10 is written as epoch 2 begins."""
    train(tmp_path, every_steps=10)
    (path,) = checkpoints(tmp_path)
    state = torch.load(path)["sampler"]
    assert (state["epoch"], state["step"]) == (1, 0)


def test_of_two_samplers_the_number_in_a_name_is_the_sum_of_their_steps(tmp_path):
    one, other = ddp.ElasticSampler(3, 1), ddp.ElasticSampler(6, 2)
    checkpoint = ddp.Checkpoint(directory=tmp_path, one=one, other=other, every_steps=1, keep=9)
    checkpoint.restore()
    for _ in zip(one.epochs(1), other.epochs(1)):
        for _ in zip(one.batches(), other.batches()):
            checkpoint.step()
    checkpoint.wait()
    assert steps(tmp_path) == [2, 4]


def test_first_a_part_of_the_data_then_all_of_it(tmp_path):
    """One checkpoint, two samplers in loops one after the other."""
    samplers = dict(easy=ddp.ElasticSampler(4, 1), all=ddp.ElasticSampler(6, 1))
    checkpoint = ddp.Checkpoint(directory=tmp_path, **samplers, every_steps=2, keep=9)
    checkpoint.restore()
    for sampler in samplers.values():
        for _ in sampler.epochs(1):
            for _ in sampler.batches():
                checkpoint.step()
    checkpoint.wait()
    assert steps(tmp_path) == [2, 4, 6, 8]


def test_batches_that_are_kept_to_be_trained_on_later_are_not_lost(tmp_path):
    sampler = ddp.ElasticSampler(4, 1)
    checkpoint = ddp.Checkpoint(directory=tmp_path, sampler=sampler, every_steps=1, keep=9)
    checkpoint.restore()
    for _ in sampler.epochs(3):
        for _ in list(sampler.batches()):
            checkpoint.step()
    checkpoint.wait()
    assert steps(tmp_path) == [4, 8]


def test_a_loop_that_says_of_no_batch_that_it_is_done_is_refused(tmp_path):
    sampler = ddp.ElasticSampler(4, 1)
    checkpoint = ddp.Checkpoint(directory=tmp_path, sampler=sampler)
    checkpoint.restore()
    with pytest.raises(ddp.Error, match=r"not called in a whole epoch(?s:.*)checkpoint.step\(\)"):
        for epoch in sampler.epochs(2):
            for _ in sampler.batches():
                assert epoch == 0
                with pytest.raises(ddp.Error, match=r"save.. after a batch (?s:.*)\.step\(\)"):
                    checkpoint.save()


def test_a_batch_after_the_last_word_is_not_saved(tmp_path):
    """Gradients that are added up over the end of an epoch belong to no checkpoint."""
    sampler = ddp.ElasticSampler(5, 1)
    checkpoint = ddp.Checkpoint(directory=tmp_path, sampler=sampler, every_steps=1, keep=9)
    checkpoint.restore()
    for _ in sampler.epochs(2):
        for _ in sampler.batches():
            if sampler.steps_done % 3 == 0:
                checkpoint.step()
        with pytest.raises(ddp.Error, match="its gradients would be lost"):
            checkpoint.save()
    checkpoint.wait()
    assert steps(tmp_path) == [3, 6, 9]


def test_the_end_of_an_epoch_that_was_resumed_may_be_shorter_than_what_is_added_up(tmp_path):
    for epochs in (1, 3):
        sampler = ddp.ElasticSampler(9, 1)
        checkpoint = ddp.Checkpoint(directory=tmp_path, sampler=sampler, every_steps=1)
        checkpoint.restore()
        for _ in sampler.epochs(epochs):
            for _ in sampler.batches():
                if sampler.steps_done % 4 == 0:
                    checkpoint.step()
        checkpoint.wait()
    assert steps(tmp_path) == [20, 24]


def test_training_that_was_not_restored_is_refused_and_removes_nothing(tmp_path):
    train(tmp_path, epochs=1)
    before = checkpoints(tmp_path)
    for call in (ddp.Checkpoint.step, ddp.Checkpoint.save):
        sampler = ddp.ElasticSampler(40, 4)
        checkpoint = ddp.Checkpoint(directory=tmp_path, sampler=sampler)
        with pytest.raises(ddp.Error, match=r"restore.. was not called"):
            call(checkpoint)
    assert checkpoints(tmp_path) == before


def test_training_goes_on_while_a_save_is_written_and_the_copy_is_of_the_moment(
    tmp_path, monkeypatch
):
    training_went_on = threading.Event()

    def sync_later(descriptor):
        training_went_on.wait(60)
        os.fsync(descriptor)

    monkeypatch.setattr(module, "sync", sync_later)
    model = torch.nn.Linear(2, 2)
    checkpoint = ddp.Checkpoint(directory=tmp_path, model=model)
    torch.nn.init.constant_(model.weight, 1.0)
    checkpoint.save()
    torch.nn.init.constant_(model.weight, 2.0)
    assert not checkpoints(tmp_path)
    training_went_on.set()
    checkpoint.wait()
    (path,) = checkpoints(tmp_path)
    assert (torch.load(path)["model"]["weight"] == 1).all()


def test_nothing_is_forked_while_a_first_file_is_written(tmp_path, monkeypatch):
    """A loader worker that was forked then could wait for ever, for a lock of glibc's."""
    begun, written = threading.Event(), threading.Event()

    def sync_later(descriptor):
        begun.set()
        time.sleep(0.5)
        written.set()

    monkeypatch.setattr(module, "sync", sync_later)
    checkpoint = ddp.Checkpoint(model=torch.nn.Linear(1, 1), directory=tmp_path)
    checkpoint.save()
    assert begun.wait(60)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if written.is_set() else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    checkpoint.wait()


def test_whatever_fails_in_the_thread_that_writes_is_told_and_leaves_the_last_good_file(
    tmp_path, monkeypatch, capsys
):
    train(tmp_path, every_steps=8)
    before = checkpoints(tmp_path)

    def fail(descriptor):
        raise KeyboardInterrupt("something nobody thought of")

    monkeypatch.setattr(module, "sync", fail)
    train(tmp_path, every_steps=8, epochs=4)
    said = capsys.readouterr().err
    assert f"something nobody thought of. The last good one is {before[-1].name}" in said
    assert said.count("was not saved") == 2 and "Training goes on." in said
    with pytest.raises(ddp.Error, match="step 24 .*was not saved: .*something nobody thought of"):
        train(tmp_path, every_steps=8, epochs=4, on_error="stop")
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_keeps_the_last_good_file(small_disk, capsys):
    """A real one, with room for one file of 400 KB and not for two."""
    train(small_disk, every_steps=8, width=315)
    said = capsys.readouterr().err
    assert f"{os.strerror(errno.ENOSPC)}. The last good one is step-00000008" in said
    (path,) = small_disk.iterdir()
    assert step_of(path) == 8 and fault(path) is None


def test_a_state_that_changes_its_shape_is_copied_anew():
    buffers = {}
    for rows in (1, 3, 2):
        state = {"rows": torch.full((rows, 2), rows), "list": [rows] * rows, "pair": (rows, "")}
        copy = copy_of(state, "part", buffers)
        assert torch.equal(copy["rows"], state["rows"]) and copy["rows"] is not state["rows"]
        assert (copy["list"], copy["pair"]) == (state["list"], state["pair"])


def test_an_old_file_that_cannot_be_removed_is_no_failed_save(tmp_path, monkeypatch, capsys):
    def refuse(keep, newest):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(module, "remove_all_but", refuse)
    train(tmp_path, every_steps=8)
    said = capsys.readouterr().err
    assert f"Old checkpoints in {tmp_path} were not removed: Permission denied" in said
    assert "was not saved" not in said and len(checkpoints(tmp_path)) == 2
