"""Saving and restoring in one process; what several ranks do is in tests/distributed."""

import hashlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ddp_common import Checkpoint, ElasticSampler, Error
from ddp_common.ranks import checkpoint_files
from ddp_common.ranks.checkpoint import copy_of
from ddp_common.ranks.checkpoint_files import checkpoints, digest_file, newest, newest_good

SIZE = 40  # samples: 10 steps an epoch


class State:
    """A model, its optimizer and its sampler, trained for some steps and saved after each."""

    def __init__(self, directory, width=3, seed=0, keep=2):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(width, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.sampler = ElasticSampler(SIZE, 4)
        self.batches = iter(self.sampler)
        self.checkpoint = Checkpoint(
            directory=directory,
            keep=keep,
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
        )

    def save(self, steps):
        for _ in range(steps):
            next(self.batches)
            self.optimizer.zero_grad()
            self.model(torch.ones(1, self.model.in_features)).sum().backward()
            self.optimizer.step()
            self.checkpoint.save()
        self.checkpoint.wait()
        return self

    @property
    def weight(self):
        return self.model.weight.detach().clone()


def saved(directory, steps=2, **kwargs):
    return State(directory, **kwargs).save(steps)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def write_with_digest(path, content):
    path.write_bytes(content)
    digest_file(path).write_text(f"{hashlib.sha256(content).hexdigest()}  {path.name}\n")


def edit(path, change):
    path.write_bytes(change(path.read_bytes()))


def flip_a_bit(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = {
    "truncated": lambda path: edit(path, lambda content: content[: len(content) // 2]),
    "flipped_bit": lambda path: edit(path, flip_a_bit),
    "empty": lambda path: edit(path, lambda content: b""),
    "foreign_bytes": lambda path: edit(path, lambda content: b"\x89PNG\r\n\x1a\n" * 40),
    "missing_digest": lambda path: digest_file(path).unlink(),
    "empty_digest": lambda path: digest_file(path).write_text(""),
    "foreign_bytes_for_a_digest": lambda path: digest_file(path).write_bytes(
        b"\xff\xfe\x00\x81" * 9
    ),
}
each_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())


def test_a_first_attempt_restores_nothing(tmp_path):
    assert State(tmp_path).checkpoint.restore() is None
    assert State(tmp_path / "not-there").checkpoint.restore() is None


def test_without_a_run_nothing_is_saved_or_restored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = State(None).save(2)
    assert state.checkpoint.restore() is None
    assert names(tmp_path) == []


def test_model_optimizer_and_position_come_back_as_they_were(tmp_path):
    before, after = saved(tmp_path, steps=3), State(tmp_path, seed=1)
    assert after.checkpoint.restore() == tmp_path / "step-00000003.pt"
    assert torch.equal(after.weight, before.weight)
    assert after.sampler.state_dict() == before.sampler.state_dict()
    moments = [state.optimizer.state_dict()["state"][0]["exp_avg_sq"] for state in (before, after)]
    assert torch.equal(*moments)


def test_only_the_newest_files_are_kept(tmp_path):
    saved(tmp_path, steps=6, keep=3)
    assert names(tmp_path) == sorted(
        f"step-0000000{step}{end}" for step in (4, 5, 6) for end in (".pt", ".sha256")
    )


def test_without_a_sampler_the_last_saves_are_kept_too(tmp_path):
    model = torch.nn.Linear(1, 1, bias=False)
    checkpoint = Checkpoint(directory=tmp_path, keep=2, model=model)
    for value in range(6):
        torch.nn.init.constant_(model.weight, value)
        checkpoint.save()
    checkpoint.wait()
    kept = [
        torch.load(path, weights_only=True)["model"]["weight"].item()
        for path in checkpoints(tmp_path)
    ]
    assert kept == [4, 5]


@each_damage
def test_a_damaged_newest_is_named_and_the_one_before_it_is_used(tmp_path, capsys, damage):
    state = State(tmp_path).save(1)
    good = state.weight
    state.save(1)
    damage(tmp_path / "step-00000002.pt")
    after = State(tmp_path, seed=1)
    assert after.checkpoint.restore() == tmp_path / "step-00000001.pt"
    assert torch.equal(after.weight, good)
    warning = capsys.readouterr().err
    assert "step-00000002.pt" in warning and "step-00000001.pt" not in warning


@each_damage
def test_when_all_are_damaged_nothing_is_restored_silently(tmp_path, damage):
    saved(tmp_path)
    for path in checkpoints(tmp_path):
        damage(path)
    with pytest.raises(Error, match="all 2 are damaged"):
        State(tmp_path).checkpoint.restore()


def test_a_restored_run_replaces_a_damaged_file_by_a_good_one(tmp_path):
    saved(tmp_path)
    DAMAGES["flipped_bit"](tmp_path / "step-00000002.pt")
    after = State(tmp_path)
    after.checkpoint.restore()
    after.save(1)
    assert newest(tmp_path) == tmp_path / "step-00000002.pt"


def test_a_leftover_temporary_file_is_ignored(tmp_path, capsys):
    saved(tmp_path)
    (tmp_path / "step-00000003.tmp").write_bytes(b"half a file")
    (tmp_path / "step-00000003.sha256").write_text("0" * 64)
    assert State(tmp_path).checkpoint.restore() == tmp_path / "step-00000002.pt"
    assert capsys.readouterr().err == ""


class Code:
    """Its pickle makes a file when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("has_digest", [False, True], ids=["digest_missing", "digest_matches"])
@pytest.mark.parametrize("form", ["torch_file", "plain_pickle"])
def test_code_in_a_checkpoint_is_refused_and_not_executed(tmp_path, has_digest, form):
    directory, trap = tmp_path / "checkpoints", tmp_path / "executed"
    directory.mkdir()
    path = directory / "step-00000001.pt"
    state = {"model": Code(trap), "optimizer": {}, "sampler": {}}
    torch.save(state, path) if form == "torch_file" else path.write_bytes(
        pickle.dumps(state, protocol=2)
    )
    if has_digest:
        write_with_digest(path, path.read_bytes())
    with pytest.raises(Error, match="step-00000001|No checkpoint") as caught:
        State(directory).checkpoint.restore()
    assert len(str(caught.value)) < 1000
    assert not trap.exists()


def test_something_that_is_no_checkpoint_is_refused_although_its_digest_matches(tmp_path):
    write_with_digest(tmp_path / "step-00000001.pt", b"not a checkpoint")
    with pytest.raises(Error, match="step-00000001"):
        State(tmp_path).checkpoint.restore()


def test_a_file_that_torch_refuses_without_a_word_is_refused_by_name(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise EOFError

    saved(tmp_path)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(Error, match="step-.* What torch says: EOFError"):
        State(tmp_path).checkpoint.restore()


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    saved(tmp_path, width=3)
    with pytest.raises(Error, match="another model"):
        State(tmp_path, width=4).checkpoint.restore()


def test_the_checkpoint_of_another_optimizer_is_refused(tmp_path):
    saved(tmp_path)
    state = State(tmp_path)
    other = torch.optim.Adam([{"params": [state.model.weight]}, {"params": [state.model.bias]}])
    with pytest.raises(Error, match="another optimizer"):
        Checkpoint(
            directory=tmp_path, model=state.model, optimizer=other, sampler=state.sampler
        ).restore()


def test_a_checkpoint_with_other_parts_is_refused_and_both_lists_are_named(tmp_path):
    state = saved(tmp_path)
    with pytest.raises(Error, match="holds model, optimizer, sampler; this run saves model"):
        Checkpoint(directory=tmp_path, model=state.model).restore()


def test_the_checkpoint_of_other_data_is_refused(tmp_path):
    state = saved(tmp_path)
    with pytest.raises(Error, match="length 40 there, 41 here"):
        Checkpoint(
            directory=tmp_path,
            model=state.model,
            optimizer=state.optimizer,
            sampler=ElasticSampler(41, 4),
        ).restore()


def test_a_part_that_has_no_state_is_refused_at_once():
    with pytest.raises(Error, match="loss"):
        Checkpoint(model=torch.nn.Linear(1, 1), loss=0.5)


SAVE_UNTIL_KILLED = """
import os, sys, torch
from ddp_common.ranks.checkpoint import Checkpoint
from ddp_common.ranks.sampling import ElasticSampler

directory, lives = sys.argv[1], int(sys.argv[2])

def save_until_killed():
    sampler = ElasticSampler(10**9, 1, shuffle=False)
    checkpoint = Checkpoint(directory=directory, model=torch.nn.Linear(300, 300), sampler=sampler)
    checkpoint.restore()
    while True:
        sampler.step += 1
        checkpoint.save()
        checkpoint.wait()
        say(f"saved {sampler.step}")

def say(line):
    # one call: a process that is killed has written the whole line, or nothing of it
    os.write(1, f"{line}\\n".encode())

for _ in range(lives):
    child = os.fork()
    if child == 0:
        save_until_killed()
    say(f"pid {child}")
    os.waitpid(child, 0)
    say(f"dead {child}")
"""


def test_a_process_killed_while_saving_leaves_a_good_checkpoint_never_older_than_one_save(
    tmp_path,
):
    lives, confirmed = 30, 0
    with subprocess.Popen(
        [sys.executable, "-c", SAVE_UNTIL_KILLED, tmp_path, str(lives)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for life in range(lives):
            child = next_of(process, "pid")[1]
            for _ in range(1 + life % 3):
                confirmed = next_of(process, "saved")[1]
            time.sleep(life * 1e-4)  # another moment of the next save each time
            os.kill(child, signal.SIGKILL)
            while (said := next_of(process, "saved", "dead"))[0] == "saved":
                confirmed = said[1]
            path = newest(tmp_path)
            assert path is not None and step_of(path) in (confirmed, confirmed + 1)
            assert list(torch.load(path, weights_only=True)) == ["model", "sampler"]
    assert process.returncode == 0


def next_of(process, *words):
    """The next line that begins with one of `words`, and the number after it."""
    for line in process.stdout:
        if line.split()[0] in words:
            return line.split()[0], int(line.split()[1])
    raise AssertionError(f"the process ended before it said one of {words}")


def step_of(path):
    return int(Path(path).stem.removeprefix("step-"))


class NumpySchedule:
    def state_dict(self):
        return {"lr": numpy.float64(0.1)}

    def load_state_dict(self, state):
        raise AssertionError("never reached")


def test_a_state_that_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(Error, match="schedule.*numpy.float64"):
        Checkpoint(directory=tmp_path, schedule=NumpySchedule()).save()
    assert not list(tmp_path.glob("*.pt"))


def test_retention_never_removes_the_file_that_was_just_written(tmp_path):
    """After a damaged newest file training goes back; the damaged ones ahead of it have to go."""
    state = saved(tmp_path, steps=4, keep=1)
    DAMAGES["flipped_bit"](tmp_path / "step-00000004.pt")
    assert newest_step(tmp_path) is None
    (tmp_path / "step-00000004.pt").rename(tmp_path / "step-00000009.pt")
    (tmp_path / "step-00000004.sha256").rename(tmp_path / "step-00000009.sha256")
    state.save(1)
    assert names(tmp_path) == ["step-00000005.pt", "step-00000005.sha256"]
    assert newest_step(tmp_path) == 5


def newest_step(directory):
    try:
        return step_of(newest(directory, quiet=True))
    except Error:
        return None


@pytest.mark.parametrize("look", [newest, newest_good])
@pytest.mark.parametrize("moment", ["listed", "digest_read"])
def test_a_file_that_retention_removes_while_somebody_looks_gives_way_to_the_newer_one(
    tmp_path, monkeypatch, capsys, look, moment
):
    run = saved(tmp_path, keep=1)
    read = {"listed": "stated_digests", "digest_read": "sha256"}[moment]
    original = getattr(checkpoint_files, read)

    def after_another_save(path):
        monkeypatch.setattr(checkpoint_files, read, original)
        run.save(1)
        return original(path)

    monkeypatch.setattr(checkpoint_files, read, after_another_save)
    assert look(tmp_path).name == "step-00000003.pt"
    assert not capsys.readouterr().err


def test_a_part_of_a_tensor_is_not_saved_as_if_it_were_the_whole():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network = torch.nn.Linear(4, 2)
        fully_shard(network)
        with pytest.raises(Error, match="state model.*weight.* is a DTensor.*Gather the whole"):
            copy_of(network.state_dict(), None, "model")
    finally:
        dist.destroy_process_group()
