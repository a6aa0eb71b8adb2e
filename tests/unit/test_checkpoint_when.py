"""When checkpoints are written, and what happens when they cannot be; one process, real files."""

import errno
import os
import threading
import time

import pytest
import torch

import ddp_common as ddp
from ddp_common.ranks import checkpoint as module
from ddp_common.ranks.checkpoint_files import checkpoints, fault

STEPS = 10


def train(directory, epochs=2, pause=0.0, width=2, **options):
    """Train one process for `epochs` of ten steps.

    Returns (the steps at which files were written, the checkpoint).
    """
    model = torch.nn.Linear(width, width)
    sampler = ddp.ElasticSampler(40, 4)
    written = []
    checkpoint = ddp.Checkpoint(directory=directory, model=model, sampler=sampler, **options)
    save = checkpoint.save
    checkpoint.save = lambda: (written.append(sampler.steps_done), save())
    for _ in sampler.epochs(epochs):
        for _ in sampler:
            time.sleep(pause)
    checkpoint.wait()
    return written, checkpoint


def test_every_k_steps_between_two_steps(tmp_path):
    assert train(tmp_path, every_steps=4, keep=9)[0] == [4, 8, 12, 16]
    assert [module.step_of(path) for path in checkpoints(tmp_path)] == [4, 8, 12, 16]


def test_the_end_of_an_epoch_belongs_to_the_next_one(tmp_path):
    """Between epochs a schedule may step: the file of step 10 is written as epoch 2 begins."""
    train(tmp_path, every_steps=10)
    state = torch.load(tmp_path / "step-00000010.pt")["sampler"]
    assert (state["epoch"], state["step"]) == (1, 0)


def test_every_t_seconds(tmp_path):
    began = time.monotonic()
    written, _ = train(tmp_path, epochs=1, pause=0.05, every_seconds=0.12, keep=9)
    most = (time.monotonic() - began) / 0.12  # four, where the machine sleeps no longer than told
    assert 1 <= len(written) <= most


def test_a_save_that_was_asked_for_is_not_repeated(tmp_path):
    sampler = ddp.ElasticSampler(40, 4)
    checkpoint = ddp.Checkpoint(
        directory=tmp_path, model=torch.nn.Linear(1, 1), sampler=sampler, every_steps=10
    )
    written = []
    for _ in sampler.epochs(2):
        for _ in sampler:
            pass
        checkpoint.save()
        checkpoint.wait()
        written.append((tmp_path / "step-00000010.pt").stat().st_mtime_ns)
    assert written[0] == written[1]


def test_a_period_needs_a_sampler(tmp_path):
    with pytest.raises(ddp.Error, match="need the sampler"):
        ddp.Checkpoint(directory=tmp_path, model=torch.nn.Linear(1, 1), every_steps=2)


@pytest.mark.parametrize("wrong", [{"on_error": "panic"}, {"keep": 0}])
def test_wrong_options_are_refused(tmp_path, wrong):
    with pytest.raises(ddp.Error, match="on_error='warn' or 'stop'"):
        ddp.Checkpoint(directory=tmp_path, model=torch.nn.Linear(1, 1), **wrong)


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


@pytest.mark.parametrize("blocked", ["no_permission", "a_file_in_its_place"])
def test_a_directory_that_cannot_be_written(tmp_path, capsys, blocked):
    directory = tmp_path / "checkpoints"
    if blocked == "a_file_in_its_place":
        directory.write_text("")
    else:
        directory = os.path.join("/proc", "checkpoints")  # also root cannot write there
    train(directory, every_steps=8)
    said = capsys.readouterr().err
    assert (
        said.count("was not saved") == 2
        and "Training goes on." in said
        and "The last good one is none" in said
    )
    with pytest.raises(ddp.Error, match="was not saved"):
        train(directory, every_steps=8, on_error="stop")


def test_a_full_disk_keeps_the_last_good_file(tmp_path, capsys):
    """A real one: a file system of 600 KB, with room for one file of 400 KB and not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=600k tmpfs {disk} 2>/dev/null") != 0:
        pytest.skip("needs the right to mount a file system (root)")
    try:
        train(disk, every_steps=8, width=315)
        said = capsys.readouterr().err
        assert f"{os.strerror(errno.ENOSPC)}. The last good one is step-00000008.pt" in said
        assert [(path.name, fault(path)) for path in checkpoints(disk)] == [
            ("step-00000008.pt", None)
        ]
        assert not list(disk.glob("*.tmp"))
    finally:
        os.system(f"umount {disk}")


def test_a_state_that_changes_its_shape_is_copied_anew(tmp_path):
    class Growing:
        def __init__(self):
            self.rows = 1

        def state_dict(self):
            return {
                "rows": torch.full((self.rows, 2), float(self.rows)),
                "list": list(range(self.rows)),
                "pair": (self.rows, torch.ones(1)),
            }

        def load_state_dict(self, state):
            self.rows = len(state["rows"])

    part = Growing()
    checkpoint = ddp.Checkpoint(directory=tmp_path, part=part)
    for part.rows in (1, 3, 2):
        checkpoint.save()
        checkpoint.wait()
        state = torch.load(checkpoints(tmp_path)[-1])["part"]
        assert (len(state["rows"]), state["list"], state["pair"][0]) == (
            part.rows,
            list(range(part.rows)),
            part.rows,
        )


@pytest.mark.parametrize("kind", [ValueError, MemoryError, KeyboardInterrupt, OSError])
def test_whatever_fails_in_the_thread_that_writes_is_told_and_leaves_the_last_good_file(
    tmp_path, monkeypatch, capsys, kind
):
    train(tmp_path, every_steps=8)
    before = checkpoints(tmp_path)

    def fail(descriptor):
        raise kind("something nobody thought of")

    monkeypatch.setattr(module, "sync", fail)
    train(tmp_path, every_steps=8)
    assert "something nobody thought of. The last good one is" in capsys.readouterr().err
    with pytest.raises(ddp.Error, match="was not saved: .*something nobody thought of"):
        train(tmp_path, every_steps=8, on_error="stop")
    assert checkpoints(tmp_path) == before
    assert not list(tmp_path.glob("*.tmp"))
