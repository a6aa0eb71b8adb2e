"""Saving and restoring in one process; what several ranks do is in tests/distributed."""

import os
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddp_common import Checkpoint, ElasticSampler, Error
from ddp_common.ranks import checkpoint_files
from ddp_common.ranks.checkpoint import finish_writing
from ddp_common.ranks.checkpoint_files import checkpoints, digest, newest, step_of
from ddp_common.ranks.states import copy_of, unwrapped


class State:
    """A model, its optimizer and its sampler, trained for some steps and saved after each."""

    def __init__(self, directory, width=3, seed=0, keep=2, lr=0.1, optimizer=torch.optim.Adam):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(width, 1)
        self.optimizer = optimizer(self.model.parameters(), lr=lr)
        self.sampler = ElasticSampler(40, 4)  # 10 steps an epoch
        self.batches = (rows for _ in self.sampler.epochs(9) for rows in self.sampler.batches())
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


def steps(directory):
    return [step_of(path) for path in checkpoints(directory)]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Saved, kept, restored


def test_model_optimizer_and_position_come_back_as_they_were(tmp_path):
    before, after = State(tmp_path).save(3), State(tmp_path, seed=1)
    assert after.checkpoint.restore() == checkpoints(tmp_path)[-1]
    assert torch.equal(after.weight, before.weight)
    assert after.sampler.state_dict() == before.sampler.state_dict()
    moments = [state.optimizer.state_dict()["state"][0]["exp_avg_sq"] for state in (before, after)]
    assert torch.equal(*moments)


def test_the_newest_files_alone_are_kept_each_with_its_digest_in_its_name(tmp_path):
    State(tmp_path, keep=3).save(6)
    assert steps(tmp_path) == [4, 5, 6]
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [
        f"step-0000000{step}.{digest(path)}.pt" for step, path in zip((4, 5, 6), files)
    ]


def test_without_a_sampler_the_last_saves_are_kept_too(tmp_path):
    model = torch.nn.Linear(1, 1, bias=False)
    checkpoint = Checkpoint(directory=tmp_path, keep=2, model=model)
    for value in range(6):
        torch.nn.init.constant_(model.weight, value)
        checkpoint.save()
    checkpoint.wait()
    kept = [torch.load(path)["model"]["weight"].item() for path in checkpoints(tmp_path)]
    assert kept == [4, 5]


def test_where_nothing_was_saved_nothing_is_restored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert State(tmp_path).checkpoint.restore() is None
    assert State(tmp_path / "not-there").checkpoint.restore() is None
    assert State(None).save(2).checkpoint.restore() is None  # without a run
    assert not list(tmp_path.iterdir())


def test_wrappers_are_known_by_their_type_and_not_by_a_name(one_rank):
    def net():
        return torch.nn.Linear(1, 1)

    plain = net()
    for wrapped in (
        DistributedDataParallel(plain),
        torch.compile(plain),
        DistributedDataParallel(torch.compile(plain)),
        torch.compile(DistributedDataParallel(plain)),
    ):
        assert unwrapped(wrapped) is plain
    with_a_part_of_that_name = torch.nn.ModuleDict({"module": net(), "other": net()})
    averaged = AveragedModel(plain)  # it has `module`, and a counter beside it
    for part in (with_a_part_of_that_name, averaged):
        assert unwrapped(part) is part
    second = Checkpoint(critic=DistributedDataParallel(plain), average=averaged)
    assert list(second.parts["critic"].state_dict()) == ["weight", "bias"]
    assert "n_averaged" in second.parts["average"].state_dict()


# Damaged files


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped_bit": flip_a_bit,
    "without_a_digest": lambda path: path.rename(path.with_name(path.name[:13] + ".pt")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_newest_is_named_and_the_one_before_it_is_used(tmp_path, capsys, damage):
    state = State(tmp_path).save(1)
    good = state.weight
    state.save(1)
    damage(checkpoints(tmp_path)[-1])
    after = State(tmp_path, seed=1)
    assert step_of(after.checkpoint.restore()) == 1
    assert torch.equal(after.weight, good)
    warning = capsys.readouterr().err
    assert "step-00000002" in warning and "step-00000001" not in warning
    after.save(1)  # a good one replaces it
    assert steps(tmp_path) == [1, 2] and step_of(newest(tmp_path)) == 2


def test_when_all_are_damaged_nothing_is_restored_silently(tmp_path):
    State(tmp_path).save(2)
    DAMAGES["flipped_bit"](checkpoints(tmp_path)[0])
    DAMAGES["without_a_digest"](checkpoints(tmp_path)[1])
    with pytest.raises(Error, match="all 2 are damaged"):
        State(tmp_path).checkpoint.restore()


def test_retention_never_removes_the_file_that_was_just_written(tmp_path):
    """After a damaged newest file training goes back; the damaged ones ahead of it have to go."""
    state = State(tmp_path, keep=1).save(4)
    (path,) = checkpoints(tmp_path)
    path.rename(path.with_name("step-00000009.0123456789abcdef.pt"))
    state.save(1)
    assert steps(tmp_path) == [5] and step_of(newest(tmp_path)) == 5


def test_a_file_that_retention_removes_while_somebody_looks_gives_way_to_the_newer_one(
    tmp_path, monkeypatch, capsys
):
    run = State(tmp_path, keep=1).save(2)

    def after_another_save(path):
        monkeypatch.setattr(checkpoint_files, "digest", digest)
        run.save(1)
        return digest(path)

    monkeypatch.setattr(checkpoint_files, "digest", after_another_save)
    assert step_of(newest(tmp_path)) == 3
    assert not capsys.readouterr().err


SAVE_UNTIL_KILLED = """
import os, sys, torch
from ddp_common import Checkpoint, ElasticSampler

def save_until_killed():
    sampler = ElasticSampler(10**9, 1, shuffle=False)
    model = torch.nn.Linear(300, 300)
    checkpoint = Checkpoint(directory=sys.argv[1], model=model, sampler=sampler)
    checkpoint.restore()
    while True:
        sampler.step += 1
        checkpoint.save()
        checkpoint.wait()
        os.write(1, b"saved %d\\n" % sampler.step)  # one call: the whole line, or nothing of it

for _ in range(12):
    child = os.fork()
    if child == 0:
        save_until_killed()
    os.write(1, b"pid %d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"dead 0\\n")
"""


def test_a_process_killed_while_saving_leaves_a_good_checkpoint_never_older_than_one_save(
    tmp_path,
):
    command = [sys.executable, "-c", SAVE_UNTIL_KILLED, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = (line.split() for line in process.stdout if not line.startswith("Resumed"))
        lives = confirmed = 0
        for _, child in said:
            for _ in range(1 + lives % 3):
                confirmed = int(next(said)[1])
            time.sleep(lives * 1e-4)  # another moment of the next save each time
            os.kill(int(child), signal.SIGKILL)
            while (line := next(said))[0] == "saved":
                confirmed = int(line[1])
            path = newest(tmp_path)
            assert path is not None and step_of(path) in (confirmed, confirmed + 1)
            assert list(torch.load(path, weights_only=True)) == ["model", "sampler"]
            lives += 1
    assert (lives, process.returncode) == (12, 0)


# What is refused


class Code:
    """Its pickle makes a file when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_refused_and_not_executed(tmp_path):
    state = {"model": Code(tmp_path / "executed"), "optimizer": {}, "sampler": {}}
    torch.save(state, tmp_path / "temporary")
    checkpoint_files.install(tmp_path / "temporary", step=1)  # its digest matches
    with pytest.raises(Error, match="step-00000001.*cannot be loaded without executing") as caught:
        State(tmp_path).checkpoint.restore()
    assert len(str(caught.value)) < 1000
    assert not (tmp_path / "executed").exists()


def test_the_checkpoint_of_another_model_or_of_other_data_or_parts_is_refused(tmp_path):
    state = State(tmp_path).save(2)
    with pytest.raises(Error, match="another model"):
        State(tmp_path, width=4).checkpoint.restore()
    with pytest.raises(Error, match="holds model, optimizer, sampler; this run saves model"):
        Checkpoint(directory=tmp_path, model=state.model).restore()
    with pytest.raises(Error, match="length 40 there, 41 here"):
        Checkpoint(
            directory=tmp_path,
            model=state.model,
            optimizer=state.optimizer,
            sampler=ElasticSampler(41, 4),
        ).restore()


def test_another_kind_of_optimizer_and_other_groups_are_refused_and_say_what_differs(tmp_path):
    State(tmp_path).save(1)
    with pytest.raises(Error, match=r"another kind of optimizer than SGD.*'betas'.*dampening"):
        State(tmp_path, optimizer=torch.optim.SGD).checkpoint.restore()
    grown = State(tmp_path)
    grown.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(Error, match="another optimizer: .*parameter groups.*from the begin"):
        grown.checkpoint.restore()


def test_another_learning_rate_is_named_with_both_values_and_can_be_set_on_purpose(
    tmp_path, capsys
):
    State(tmp_path, lr=0.1).save(1)
    again = State(tmp_path, lr=0.1)
    again.checkpoint.restore()
    assert capsys.readouterr().err == ""
    other = State(tmp_path, lr=0.5)
    other.checkpoint.restore()
    said = capsys.readouterr().err
    assert "optimizer.param_groups[0]['lr'] = 0.1, as it was saved" in said and "0.5" in said
    assert other.optimizer.param_groups[0]["lr"] == 0.1


def test_another_schedule_is_named_and_one_that_has_only_gone_on_is_not(tmp_path, capsys):
    def scheduled(kind, **options):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = kind(optimizer, **options)
        parts = dict(model=model, optimizer=optimizer, schedule=schedule)
        return Checkpoint(directory=tmp_path, **parts), schedule

    schedules = torch.optim.lr_scheduler
    checkpoint, schedule = scheduled(schedules.StepLR, step_size=1)
    for _ in range(3):
        schedule.optimizer.step()
        schedule.step()
    checkpoint.save()
    checkpoint.wait()
    scheduled(schedules.StepLR, step_size=1)[0].restore()
    assert capsys.readouterr().err == ""
    scheduled(schedules.StepLR, step_size=7)[0].restore()
    assert "schedule.step_size = 1, as it was saved; this program has made it with 7" in (
        capsys.readouterr().err
    )
    with pytest.raises(Error, match="another kind of schedule than CosineAnnealingLR.*step_size"):
        scheduled(schedules.CosineAnnealingLR, T_max=9)[0].restore()


def test_two_checkpoints_of_a_run_do_not_save_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_CHECKPOINTS", str(tmp_path))
    latest, second, best = State(None), State(None), State("best")
    latest.save(1)
    with pytest.raises(Error, match="Two Checkpoints of this run.*directory='best'"):
        second.save(1)
    best.save(2)
    finish_writing()
    assert steps(tmp_path) == [1] and steps(tmp_path / "best") == [1, 2]
    second.save(1)  # in the next run of this process
    finish_writing()


class NumpySchedule:
    def state_dict(self):
        return {"lr": numpy.float64(0.1)}

    def load_state_dict(self, state):
        raise AssertionError("never reached")


class Tagged(torch.Tensor):
    """A tensor of a class that loading does not know."""


class TaggedPart(NumpySchedule):
    def state_dict(self):
        return {"weight": torch.ones(2).as_subclass(Tagged)}


def test_a_state_that_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(Error, match="schedule.*numpy.float64"):
        Checkpoint(directory=tmp_path, schedule=NumpySchedule()).save()
    checkpoint = Checkpoint(directory=tmp_path, part=TaggedPart(), on_error="stop")
    checkpoint.save()
    with pytest.raises(Error, match="step 0 .* was not saved: .*cannot be loaded.*Tagged"):
        checkpoint.wait()
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_tensor_is_not_saved_as_if_it_were_the_whole(one_rank):
    network = torch.nn.Linear(4, 2)
    fully_shard(network)
    with pytest.raises(Error, match="state model.*weight.* is a DTensor.*Gather the whole"):
        copy_of(network.state_dict(), None, "model")


@pytest.mark.parametrize("wrong", [{"on_error": "panic"}, {"keep": 0}, {"every_steps": 2}])
def test_wrong_options_and_parts_without_a_state_are_refused_at_once(tmp_path, wrong):
    with pytest.raises(Error, match="on_error='warn' or 'stop'|need the sampler"):
        Checkpoint(directory=tmp_path, model=torch.nn.Linear(1, 1), **wrong)
    with pytest.raises(Error, match="cannot save loss"):
        Checkpoint(model=torch.nn.Linear(1, 1), loss=0.5)
