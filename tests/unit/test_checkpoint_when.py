"""When checkpoints are written, and what happens when they cannot be; one process, real files."""

import errno
import itertools
import os
import threading
from types import SimpleNamespace

import pytest
import torch

import ddp_common as ddp
from ddp_common.ranks import checkpoint as module
from ddp_common.ranks.checkpoint_files import checkpoints, fault, step_of
from ddp_common.ranks.states import copy_of


def train(directory, epochs=2, width=2, **options):
    """Train one process for `epochs` of ten steps; returns the checkpoint."""
    sampler = ddp.ElasticSampler(40, 4)
    checkpoint = ddp.Checkpoint(
        directory=directory, model=torch.nn.Linear(width, width), sampler=sampler, **options
    )
    for _ in sampler.epochs(epochs):
        for _ in sampler.batches():
            pass
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


class Interrupted(Exception):
    """Training ends here, as it would by SIGKILL."""


def accumulate(directory, scaler, ends_at=None, bad_batch=8):
    """Train 2 epochs of ten batches, with a step for every four; returns model and scale.

    With `scaler`, the gradients of `bad_batch` are infinite, so that the scaler skips a step.
    """
    torch.manual_seed(0)
    data = torch.randn(40, 3)
    model = torch.nn.Linear(3, 1)
    parts = dict(model=model, optimizer=torch.optim.Adam(model.parameters()))
    if scaler:
        parts["scaler"] = torch.amp.GradScaler("cpu")
    sampler = ddp.ElasticSampler(40, 4)
    checkpoint = ddp.Checkpoint(
        directory=directory, **parts, sampler=sampler, every_steps=3, keep=9
    )
    checkpoint.restore()
    for _ in sampler.epochs(2):
        for rows in sampler.batches():
            if sampler.steps_done == ends_at:
                checkpoint.wait()
                raise Interrupted
            loss = model(data[rows]).square().mean()
            if not scaler:
                loss.backward()
            else:
                bad = torch.inf if sampler.steps_done == bad_batch else 1
                parts["scaler"].scale(loss * bad).backward()
            if sampler.steps_done % 4 != 0:
                with pytest.raises(ddp.Error, match="gradients of the last batch would be lost"):
                    checkpoint.save()
                continue
            if not scaler:
                parts["optimizer"].step()
            else:
                parts["scaler"].step(parts["optimizer"])
                assert not checkpoint.is_at_boundary(), "before update()"
                parts["scaler"].update()
            parts["optimizer"].zero_grad()
    checkpoint.wait()
    return model.weight, parts["scaler"].get_scale() if scaler else None


@pytest.mark.parametrize("scaler", [False, True])
def test_gradients_of_several_batches_are_never_cut_and_resume_bit_for_bit(tmp_path, scaler):
    weight, scale = accumulate(tmp_path / "whole", scaler)
    assert steps(tmp_path / "whole") == [4, 8, 12, 16]
    for ends_at in (7, 10, 15):
        with pytest.raises(Interrupted):
            accumulate(tmp_path / "run", scaler, ends_at)
    assert steps(tmp_path / "run")[-1] == 12
    resumed_weight, resumed_scale = accumulate(tmp_path / "run", scaler)
    assert torch.equal(resumed_weight, weight) and resumed_scale == scale


def small_training(directory, length):
    """A model, its optimizer, a sampler, and a checkpoint that saves as often as it may."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    sampler = ddp.ElasticSampler(length, 1)
    parts = dict(optimizer=optimizer, sampler=sampler)
    checkpoint = ddp.Checkpoint(directory=directory, **parts, every_steps=1, keep=9)
    return model, optimizer, sampler, checkpoint


def test_each_optimizer_decides_about_its_own_gradients(tmp_path):
    """One steps after every batch, the other after every fourth; a third has nothing to do."""
    models = [torch.nn.Linear(1, 1) for _ in range(3)]
    often, seldom, never = (torch.optim.SGD(model.parameters()) for model in models)
    sampler = ddp.ElasticSampler(40, 4)
    parts = dict(often=often, seldom=seldom, never=never, sampler=sampler)
    checkpoint = ddp.Checkpoint(directory=tmp_path, **parts, every_steps=1, keep=9)
    for _ in sampler.epochs(2):
        for _ in sampler.batches():
            (models[0](torch.ones(1, 1)) + models[1](torch.ones(1, 1))).sum().backward()
            often.step()
            often.zero_grad()
            if sampler.steps_done % 4 == 0:
                seldom.step()
    checkpoint.wait()
    assert steps(tmp_path) == [4, 8, 12, 16]


def test_optimizers_that_step_in_turns_have_boundaries_in_common(tmp_path):
    """As a GAN's may: its gradients of an earlier batch are used, and stay until its next one."""
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    sampler = ddp.ElasticSampler(40, 4)
    checkpoints_of_both = [
        ddp.Checkpoint(directory=tmp_path / str(i), optimizer=optimizer, sampler=sampler)
        for i, optimizer in enumerate(optimizers)
    ]
    for _ in sampler.epochs(1):
        for _ in sampler.batches():
            turn = sampler.step % 2
            optimizers[turn].zero_grad(set_to_none=sampler.step % 3 > 0)
            models[turn](torch.ones(1, 1)).sum().backward()
            assert not checkpoints_of_both[turn].is_at_boundary()
            optimizers[turn].step()
            assert all(checkpoint.is_at_boundary() for checkpoint in checkpoints_of_both)


def test_the_first_sampler_among_the_parts_decides_whatever_its_name(tmp_path):
    """It trains in turns with another one; gradients that batches of both add up are not cut."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    first, second = ddp.ElasticSampler(9, 1), ddp.ElasticSampler(9, 1)
    checkpoint = ddp.Checkpoint(
        directory=tmp_path, optimizer=optimizer, train=first, other=second, every_steps=1, keep=9
    )
    for _ in zip(first.epochs(1), second.epochs(1)):
        others = second.batches()
        for _ in first.batches():
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            if first.step % 3 == 0:
                for _ in itertools.islice(others, 3):
                    model(torch.ones(1, 1)).sum().backward()
    checkpoint.wait()
    assert steps(tmp_path) == [1, 2, 7, 8, 13, 14]


def test_in_a_later_loop_its_sampler_decides(tmp_path):
    """First a part of the data, then all of it: one checkpoint, two samplers."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    samplers = dict(easy=ddp.ElasticSampler(4, 1), all=ddp.ElasticSampler(6, 1))
    checkpoint = ddp.Checkpoint(
        directory=tmp_path, optimizer=optimizer, **samplers, every_steps=2, keep=9
    )
    for sampler in samplers.values():
        for _ in sampler.epochs(1):
            for _ in sampler.batches():
                with pytest.raises(ddp.Error, match="gradients of the last batch would be lost"):
                    checkpoint.save()
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
    checkpoint.wait()
    assert steps(tmp_path) == [2, 4, 6, 8]


class Sam(torch.optim.Optimizer):
    """As published programs write it: another optimizer makes the step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, dict(lr=lr))
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups


def test_a_step_that_another_optimizer_makes_is_one_of_the_part(tmp_path):
    model = torch.nn.Linear(1, 1)
    sam = Sam(model.parameters(), lr=0.1)
    sampler = ddp.ElasticSampler(4, 1)
    parts = dict(optimizer=sam, sampler=sampler)
    checkpoint = ddp.Checkpoint(directory=tmp_path, **parts, every_steps=1, keep=9)
    for _ in sampler.epochs(1):
        for _ in sampler.batches():
            sam.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            sam.base_optimizer.step()
    checkpoint.wait()
    assert steps(tmp_path) == [1, 2, 3]


def test_a_batch_that_is_skipped_and_gradients_of_0_hold_up_a_checkpoint_for_one_step(tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters()) for _ in range(2)]
    sampler = ddp.ElasticSampler(8, 1)
    parts = dict(one=optimizers[0], other=optimizers[1], sampler=sampler)
    checkpoint = ddp.Checkpoint(directory=tmp_path, **parts, every_steps=1, keep=9)
    for _ in sampler.epochs(1):
        for _ in sampler.batches():
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            if sampler.step % 2 == 0:
                continue
            (0 * model(torch.ones(1, 1))).sum().backward()
            optimizers[0].step()
    checkpoint.save()
    checkpoint.wait()
    assert steps(tmp_path) == [1, 3, 5, 7, 8]


def test_batches_that_are_kept_to_be_trained_on_later_are_not_lost(tmp_path):
    model, optimizer, sampler, checkpoint = small_training(tmp_path, 4)
    for _ in sampler.epochs(3):
        for _ in list(sampler.batches()):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    checkpoint.wait()
    assert steps(tmp_path) == [4, 8]


def test_micro_batches_that_wait_for_a_step_of_the_next_batch_are_not_lost(tmp_path):
    model, optimizer, sampler, checkpoint = small_training(tmp_path, 8)
    added_up = 0
    for _ in sampler.epochs(1):
        for _ in sampler.batches():
            for _ in range(3):
                model(torch.ones(1, 1)).sum().backward()
                added_up += 1
                if added_up % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    checkpoint.wait()
    assert steps(tmp_path) == [4]


def test_a_checkpoint_that_can_never_save_says_why(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "OVERDUE", 3)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    sampler = ddp.ElasticSampler(8, 1)
    ddp.Checkpoint(directory=tmp_path, forgotten=optimizer, sampler=sampler, every_steps=1)
    for _ in sampler.epochs(1):
        for _ in sampler.batches():
            model(torch.ones(1, 1)).sum().backward()
    assert capsys.readouterr().err.count("forgotten had gradients that no step has used") == 1


def test_every_t_seconds(tmp_path, monkeypatch):
    clock = itertools.count()  # a second passes between two looks at it, of this module alone
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    train(tmp_path, epochs=1, every_seconds=3, keep=9)
    assert steps(tmp_path) == [3, 6, 9]


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


def test_whatever_fails_in_the_thread_that_writes_is_told_and_leaves_the_last_good_file(
    tmp_path, monkeypatch, capsys
):
    train(tmp_path, every_steps=8)
    before = checkpoints(tmp_path)

    def fail(descriptor):
        raise KeyboardInterrupt("something nobody thought of")

    monkeypatch.setattr(module, "sync", fail)
    train(tmp_path, every_steps=8)
    said = capsys.readouterr().err
    assert f"something nobody thought of. The last good one is {before[-1].name}" in said
    assert said.count("was not saved") == 2 and "Training goes on." in said
    with pytest.raises(ddp.Error, match="step 8 .*was not saved: .*something nobody thought of"):
        train(tmp_path, every_steps=8, on_error="stop")
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_keeps_the_last_good_file(tmp_path, capsys):
    """A real one: a file system of 600 KB, with room for one file of 400 KB and not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=600k tmpfs {disk} 2>/dev/null") != 0:
        pytest.skip("needs the right to mount a file system (root)")
    try:
        train(disk, every_steps=8, width=315)
        said = capsys.readouterr().err
        assert f"{os.strerror(errno.ENOSPC)}. The last good one is step-00000008" in said
        (path,) = disk.iterdir()
        assert step_of(path) == 8 and fault(path) is None
    finally:
        os.system(f"umount {disk}")


def test_a_state_that_changes_its_shape_is_copied_anew():
    copy = None
    for rows in (1, 3, 2):
        state = {"rows": torch.full((rows, 2), rows), "list": [rows] * rows, "pair": (rows, "")}
        copy = copy_of(state, copy, "part")
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
