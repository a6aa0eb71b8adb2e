"""Saving and restoring in one process; what several ranks do is in tests/distributed."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddp_common import Checkpoint, ElasticSampler, Error, checkpoint_files, reporting
from ddp_common.checkpoint import finish_writing
from ddp_common.checkpoint_files import checkpoints, digest, newest, step_of
from ddp_common.parts import copy_of
from ddp_common.replicas import unwrapped


def batches_of(sampler, epochs=9):
    for _ in sampler.epochs(epochs):
        yield from sampler.batches()


class State:
    """A model, its optimizer and its sampler, trained for some steps and saved after each."""

    def __init__(self, directory, width=3, seed=0, keep=2, lr=0.1, optimizer=torch.optim.Adam):
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(width, 1)
        self.optimizer = optimizer(self.model.parameters(), lr=lr)
        self.sampler = ElasticSampler(40, 4)  # 10 steps an epoch
        self.batches = batches_of(self.sampler)
        self.checkpoint = Checkpoint(
            directory=directory,
            keep=keep,
            model=self.model,
            optimizer=self.optimizer,
            sampler=self.sampler,
        )

    def save(self, steps):
        if not self.checkpoint._was_restored:
            self.checkpoint.restore()
        for _ in range(steps):
            next(self.batches)
            self.optimizer.zero_grad()
            self.model(torch.ones(1, self.model.in_features)).sum().backward()
            self.optimizer.step()
            self.checkpoint.step()
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
    assert list(second.parts["critic"].value.state_dict()) == ["weight", "bias"]
    assert "n_averaged" in second.parts["average"].value.state_dict()


# Damaged files


def put(directory, content):
    """A file of step 1 with this content, bytes or what torch.save takes, and the right digest."""
    temporary = directory / "content"
    if isinstance(content, bytes):
        temporary.write_bytes(content)
    else:
        torch.save(content, temporary)
    return checkpoint_files.install(temporary, step=1)


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


@pytest.mark.parametrize("odd", ["mode 000", "link", "FIFO"])
def test_what_cannot_be_read_ends_the_resume_and_stays(odd):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        State(folder).save(2)
        before, path = checkpoints(folder)
        why = "is a link or something else"
        if odd == "mode 000":
            path.chmod(0)
            why = "cannot be read: Permission denied"
        else:
            path.unlink()
            os.mkfifo(path) if odd == "FIFO" else path.symlink_to("/dev/zero")
        after = State(folder)
        os.seteuid(os.getuid() or 65534)  # root may read all
        try:
            with pytest.raises(Error, match=f"{path} {why}"):
                after.checkpoint.restore()
            checkpoint_files.remove_all_but(1, before)
        finally:
            os.seteuid(os.getuid())
        assert checkpoints(folder) == [before, path]


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


def test_a_damaged_file_is_none_of_those_that_stay(tmp_path):
    State(tmp_path).save(3)
    DAMAGES["flipped_bit"](checkpoints(tmp_path)[-1])
    state = State(tmp_path)
    state.checkpoint.restore()
    state.sampler.step += 2  # the next save has more steps than the damaged file
    state.save(1)
    assert steps(tmp_path) == [2, 5]


def test_a_good_checkpoint_of_another_run_stays(tmp_path):
    """Somebody has copied it there meanwhile."""
    state = State(tmp_path / "run").save(2)
    State(tmp_path / "further").save(9)
    (further,) = checkpoints(tmp_path / "further")[1:]
    shutil.copy(further, tmp_path / "run")
    state.save(1)
    assert steps(tmp_path / "run") == [2, 3, 9]


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

for _ in range(20):
    child = os.fork()
    if child == 0:
        save_until_killed()
    os.write(1, b"pid %d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"dead 0\\n")
"""


def test_killed_20_times_while_saving_no_confirmed_step_is_lost_and_the_next_save_tidies_up(
    tmp_path,
):
    chance = random.Random(1)
    command = [sys.executable, "-c", SAVE_UNTIL_KILLED, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = (line.split() for line in process.stdout if not line.startswith("Resumed"))
        lives = confirmed = 0
        for _, child in said:
            for _ in range(1 + lives % 3):
                confirmed = int(next(said)[1])
            time.sleep(chance.random() * 0.003)  # any moment of the next save
            os.kill(int(child), signal.SIGKILL)
            while (line := next(said))[0] == "saved":
                confirmed = int(line[1])
            path = newest(tmp_path)
            assert path is not None and step_of(path) in (confirmed, confirmed + 1)
            assert list(torch.load(path, weights_only=True)) == ["model", "sampler", "written_by"]
            lives += 1
            assert len(list(tmp_path.glob("*.tmp"))) <= 1
    assert (lives, process.returncode) == (20, 0)
    checkpoint = Checkpoint(directory=tmp_path, model=torch.nn.Linear(1, 1))
    checkpoint.save()
    checkpoint.wait()
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt"}


def test_restoring_removes_what_a_kill_has_left_and_not_what_somebody_is_writing(tmp_path):
    unfinished = tmp_path / checkpoint_files.TEMPORARY
    with open(unfinished, "wb") as file:
        checkpoint_files.hold(file)
        State(tmp_path).checkpoint.restore()
        assert unfinished.exists()
    State(tmp_path).checkpoint.restore()
    assert not unfinished.exists()


# What is refused


class Code:
    """Its pickle makes a file when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_refused_and_not_executed(tmp_path):
    put(tmp_path, {"model": Code(tmp_path / "executed"), "optimizer": {}, "sampler": {}})
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
    parts = {"model": state.model, "optimizer": state.optimizer, "sampler": ElasticSampler(41, 4)}
    with pytest.raises(Error, match="length 40 there, 41 here"):
        Checkpoint(directory=tmp_path, **parts).restore()


def saved_content(directory):
    (path,) = checkpoints(directory)
    content = torch.load(path, weights_only=True)
    path.unlink()
    return content


def test_any_content_behind_a_right_digest_is_an_error(tmp_path):
    state = State(tmp_path, keep=1).save(1)
    (path,) = checkpoints(tmp_path)
    whole = path.read_bytes()
    good = saved_content(tmp_path)
    contents = [None, [1], {}, {1: 2}, torch.ones(3), {**good, "written_by": None}]
    contents += [whole[:200], whole[:-30], b"", bytes(300), b"\x80\x02" + bytes(range(100))]
    for name in state.checkpoint.parts:
        for wrong in (None, [1], {}, {"state": 3, "param_groups": 4}, "text"):
            contents.append({**good, name: wrong})
            contents.append({**good, "written_by": {**good["written_by"], name: wrong}})
    for content in contents:
        path = put(tmp_path, content)
        with pytest.raises(Error):
            State(tmp_path).checkpoint.restore()
        path.unlink()


def restored_with(directory, **parts):
    Checkpoint(directory=directory, **parts).restore()


def saved_with(directory, **parts):
    checkpoint = Checkpoint(directory=directory, keep=1, **parts)
    checkpoint.save()
    checkpoint.wait()
    return checkpoint


class TwoLayers(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Linear(1, 1, bias=False))


def test_an_optimizer_of_another_kind_order_dtype_or_with_other_groups_is_refused(tmp_path):
    State(tmp_path).save(1)
    with pytest.raises(Error, match="by another optimizer: Adam there, AdamW here"):
        State(tmp_path, optimizer=torch.optim.AdamW).checkpoint.restore()
    grown = State(tmp_path)
    grown.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(Error, match="only here is parameter 2.* make all parameter groups"):
        grown.checkpoint.restore()

    first, other = TwoLayers("ab"), TwoLayers("ba")
    one, two = (torch.optim.Adam(model.parameters()) for model in (first, other))
    saved_with(tmp_path / "order", model=first, optimizer=one)
    with pytest.raises(Error, match="parameter 0 is model.a.weight there, model.b.weight h"):
        restored_with(tmp_path / "order", model=other, optimizer=two)

    saved_with(tmp_path / "dtype", model=torch.nn.Linear(1, 1).double())
    with pytest.raises(Error, match="weight is torch.float64 .*there, torch.float32"):
        restored_with(tmp_path / "dtype", model=torch.nn.Linear(1, 1))


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


def scheduled(directory, kind, *options, lr=0.1, **named):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = kind(optimizer, *options, **named)
    parts = dict(net=model, optimizer=optimizer, schedule=schedule)
    return Checkpoint(directory=directory, **parts), schedule


SCHEDULES = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("kind", "made", "other", "words"),
    [
        (SCHEDULES.StepLR, [1], [7], "step_size is 1 there, 7 here"),
        (SCHEDULES.CosineAnnealingLR, [8], [16], "T_max is 8 there, 16 here"),
        (SCHEDULES.OneCycleLR, [0.1, 8], [0.1, 16], "total_steps is 8 there, 16 here"),
        (SCHEDULES.MultiStepLR, [[2]], [[3]], r"milestones is Counter\(\{2: 1\}\) there"),
        (SCHEDULES.CyclicLR, [0.1, 0.2], [0.1, 0.3], r"max_lrs is \[0.2\] there"),
        (SCHEDULES.StepLR, [1], ["lr"], r"base_lrs is \[0.1\] there, \[0.2\] here"),
    ],
    ids=["StepLR", "cosine", "one cycle", "milestones", "cyclic", "another rate"],
)
def test_a_schedule_that_was_made_otherwise_is_refused_and_one_that_has_gone_on_is_not(
    tmp_path, capsys, kind, made, other, words
):
    checkpoint, schedule = scheduled(tmp_path, kind, *made)
    for _ in range(3):
        schedule.optimizer.step()
        schedule.step()
    checkpoint.save()
    checkpoint.wait()
    again, resumed = scheduled(tmp_path, kind, *made)
    again.restore()
    assert resumed.last_epoch == 3 and capsys.readouterr().err == ""
    longer = scheduled(tmp_path, kind, *other)
    if other == ["lr"]:
        longer = scheduled(tmp_path, kind, *made, lr=0.2)
    with pytest.raises(Error, match=f"with another schedule: {words}") as caught:
        longer[0].restore()
    model = longer[0].parts["net"].value
    line = str(caught.value).rpartition("this folder: ")[2]
    exec(line, {"torch": torch, "model": model})  # what it advises
    assert torch.equal(model.weight, checkpoint.parts["net"].value.weight)
    with pytest.raises(Error, match="another schedule: .* there, ExponentialLR here"):
        scheduled(tmp_path, SCHEDULES.ExponentialLR, 0.5)[0].restore()


def test_another_maximum_of_one_cycle_is_refused_and_another_function_is_told(
    tmp_path, monkeypatch
):
    made = scheduled(tmp_path, SCHEDULES.OneCycleLR, 0.1, total_steps=9)[0]
    made.save()
    made.wait()
    other = scheduled(tmp_path, SCHEDULES.OneCycleLR, 0.2, total_steps=9, div_factor=50)[0]
    with pytest.raises(Error, match="max_lr of group 0 is 0.1 there, 0.2 here"):
        other.restore()
    checkpoint, schedule = scheduled(tmp_path / "f", SCHEDULES.LambdaLR, lambda n: 1 - n / 8)
    schedule.optimizer.step()
    schedule.step(0.5)  # as some count: in parts of an epoch
    checkpoint.save()
    checkpoint.wait()
    told = []
    monkeypatch.setattr(reporting, "post", told.append)
    rounded = lambda n: (1 - n / 8) * (1 + 1e-9)  # noqa: E731
    scheduled(tmp_path / "f", SCHEDULES.LambdaLR, rounded)[0].restore()
    assert not told
    scheduled(tmp_path / "f", SCHEDULES.LambdaLR, lambda n: 1 - n / 16)[0].restore()
    assert "function of schedule is another one than in the run that saved" in told[0].text


def test_a_schedule_of_the_optimizer_within_sam_is_one_of_sam(tmp_path):
    model = torch.nn.Linear(1, 1)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    sam = torch.optim.SGD(model.parameters(), lr=0.1)
    sam.param_groups = base.param_groups
    schedule = SCHEDULES.StepLR(base, 1)
    saved_with(tmp_path, model=model, sam=sam, base=base, schedule=schedule)


def test_a_model_that_is_not_made_yet_is_named(tmp_path):
    made = torch.nn.Sequential(torch.nn.LazyLinear(1))
    made(torch.ones(1, 3))
    saved_with(tmp_path, model=made)
    with pytest.raises(Error, match=r"not made yet \(call the model once\) here"):
        restored_with(tmp_path, model=torch.nn.Sequential(torch.nn.LazyLinear(1)))


def test_a_schedule_that_is_no_part_is_refused_and_the_two_ways_out_are_right(tmp_path):
    checkpoint, schedule = scheduled(tmp_path, SCHEDULES.StepLR, 1)
    optimizer, net = schedule.optimizer, checkpoint.parts["net"].value
    with pytest.raises(Error, match="A schedule drives optimizer.*begin again"):
        Checkpoint(directory=tmp_path, net=net, optimizer=optimizer).save()
    sampler = ElasticSampler(4, 1)
    parts = dict(net=net, optimizer=optimizer, sampler=sampler)
    with_sampler = Checkpoint(directory=tmp_path / "steps", **parts)
    with_sampler.restore()
    with pytest.raises(Error, match="A schedule drives optimizer"):
        with_sampler.step()
    Checkpoint(directory=tmp_path, net=net, optimizer=optimizer, schedule=schedule).save()
    for group in optimizer.param_groups:
        del group["initial_lr"]
    Checkpoint(directory=tmp_path, net=net, optimizer=optimizer).save()


def test_an_optimizer_that_trains_what_no_part_has_is_refused(tmp_path):
    net, loss = torch.nn.Linear(2, 1), torch.nn.BCEWithLogitsLoss()
    loss.weight_of_tasks = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()])
    parts = {"net": net, "optimizer": optimizer}
    with pytest.raises(Error, match=r"trains 1 parameter.*of shape \(3,\).*Checkpoint"):
        Checkpoint(directory=tmp_path, **parts).save()
    Checkpoint(directory=tmp_path, **parts, loss=loss).save()


@pytest.mark.parametrize("is_lowered_once_more", [False, True])
def test_options_that_the_head_of_a_resumed_epoch_changes_once_more_are_refused(
    tmp_path, is_lowered_once_more
):
    def train(stops_at):
        state = State(None)
        parts = {"net": state.model, "optimizer": state.optimizer, "sampler": state.sampler}
        checkpoint = Checkpoint(directory=tmp_path, every_steps=1, **parts)
        checkpoint.restore()
        (group,) = state.optimizer.param_groups
        for epoch in state.sampler.epochs(2):
            group["lr"] = group["lr"] / 10 if is_lowered_once_more else 0.1**epoch
            for _ in state.sampler.batches():
                if state.sampler.step == stops_at:
                    return checkpoint.wait()
                checkpoint.step()

    train(stops_at=2)
    refused = pytest.raises(Error, match=r"head of an epoch has changed optimizer.*'lr'.*0\.5")
    with refused if is_lowered_once_more else contextlib.nullcontext():
        train(stops_at=None)


def test_a_schedule_that_steps_below_save_is_refused_and_one_at_the_head_of_an_epoch_is_not(
    tmp_path,
):
    def train(where):
        state = State(None)
        parts = {"net": state.model, "optimizer": state.optimizer, "sampler": state.sampler}
        schedule = SCHEDULES.StepLR(state.optimizer, 1)
        checkpoint = Checkpoint(directory=tmp_path / where, schedule=schedule, **parts)
        checkpoint.restore()
        for _ in state.sampler.epochs(2):
            if where == "head":
                schedule.step()
            for _ in state.sampler.batches():
                state.optimizer.step()
                checkpoint.step()
            if where == "above":
                schedule.step()
            checkpoint.save()
            if where == "below":
                schedule.step()

    train("head")
    train("above")
    with pytest.raises(Error, match="schedule has stepped after save.*above checkpoint.save"):
        train("below")


def test_weights_with_a_nan_are_not_saved_and_the_last_good_file_stays(tmp_path, capsys):
    state = State(tmp_path).save(2)
    state.model.weight.data[0, 1] = float("nan")
    state.save(1)
    assert steps(tmp_path) == [1, 2]
    said = capsys.readouterr().err
    assert "was not saved: model.weight has a NaN. The last good one is step-00000002" in said


def warm_up_then(directory, second, **options):
    """A schedule of two; the second begins at its milestone, after two steps."""
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedules = torch.optim.lr_scheduler
    first = schedules.LinearLR(optimizer, 0.1, total_iters=2)
    schedule = schedules.SequentialLR(optimizer, [first, second(optimizer, **options)], [2])
    return Checkpoint(directory=directory, net=net, optimizer=optimizer, schedule=schedule)


def rates(checkpoint, steps):
    found = []
    for _ in range(steps):
        checkpoint.parts["optimizer"].value.step()
        checkpoint.parts["schedule"].value.step()
        found.append(checkpoint.parts["optimizer"].value.param_groups[0]["lr"])
    return found


class Frozen(torch.nn.Module):
    """A backbone, and a head."""

    def __init__(self, is_frozen):
        super().__init__()
        self.backbone = torch.nn.Linear(2, 2).requires_grad_(not is_frozen)
        self.head = torch.nn.Linear(2, 1)


def test_parameters_are_trained_or_frozen_as_they_were_saved(tmp_path, one_rank):
    saved_with(tmp_path, model=Frozen(False))
    plain = Frozen(True)
    restored_with(tmp_path, model=plain)
    assert all(each.requires_grad for each in plain.parameters())
    wrapped = DistributedDataParallel(Frozen(True))
    words = r"requires_grad of model.backbone.\w+ was True.*before DistributedDataParallel"
    with pytest.raises(Error, match=words):
        restored_with(tmp_path, model=wrapped)
    restored_with(tmp_path, model=DistributedDataParallel(Frozen(False)))
    # A GAN's, say: its discriminator was frozen at that moment, and DDP averages it all the same
    saved_with(tmp_path / "frozen", model=Frozen(True))
    model = DistributedDataParallel(Frozen(False))
    restored_with(tmp_path / "frozen", model=model)
    assert not model.module.backbone.weight.requires_grad


def test_a_block_that_was_compiled_is_named_with_what_helps(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(1, 1))
    saved_with(tmp_path, model=torch.nn.Sequential(torch.compile(torch.nn.Linear(1, 1))))
    with pytest.raises(Error, match=r"_orig_mod.*part.compile\(\) changes no names"):
        restored_with(tmp_path, model=net)
    net[0].compile()
    saved_with(tmp_path / "in place", model=net)
    restored_with(tmp_path / "in place", model=torch.nn.Sequential(torch.nn.Linear(1, 1)))


def test_restoring_without_a_sampler_says_that_the_loop_has_to_go_on_by_itself(tmp_path, capsys):
    saved_with(tmp_path, model=torch.nn.Linear(1, 1))
    restored_with(tmp_path, model=torch.nn.Linear(1, 1))
    assert "No ElasticSampler is a part" in capsys.readouterr().out
    State(tmp_path / "with").save(1)
    State(tmp_path / "with").checkpoint.restore()
    assert "No ElasticSampler" not in capsys.readouterr().out


def test_a_schedule_with_a_counter_goes_on_as_if_nothing_had_been(tmp_path):
    schedules = torch.optim.lr_scheduler
    options = dict(second=schedules.MultiStepLR, milestones=[1, 2])
    whole = rates(warm_up_then(tmp_path, **options), 6)
    first = warm_up_then(tmp_path, **options)
    begun = rates(first, 1)
    first.save()
    first.wait()
    resumed = warm_up_then(tmp_path, **options)
    resumed.restore()
    assert begun + rates(resumed, 5) == whole
    with pytest.raises(Error, match="LinearLR, MultiStepLR.* there, .*LinearLR, ExponentialLR"):
        warm_up_then(tmp_path, schedules.ExponentialLR, gamma=0.5).restore()


class Rounds(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of one's own: what moves while it runs, only its author knows."""

    def __init__(self, optimizer, length=4):
        self.length, self.in_round = length, -1
        super().__init__(optimizer)

    def get_lr(self):
        return [base * (1 - self.in_round / self.length) for base in self.base_lrs]

    def step(self, epoch=None):
        self.in_round = (self.in_round + 1) % self.length
        super().step()


def test_a_schedule_class_of_ones_own_goes_on(tmp_path):
    checkpoint, schedule = scheduled(tmp_path, Rounds)
    for _ in range(6):
        schedule.optimizer.step()
        schedule.step()
    checkpoint.save()
    checkpoint.wait()
    again, resumed = scheduled(tmp_path, Rounds)
    again.restore()
    assert resumed.in_round == schedule.in_round == 2


def test_states_keep_their_types_and_the_versions_of_their_modules(tmp_path):
    state = {"counter": Counter("aab"), "pair": (1, [2.0]), "size": torch.Size([3]), "set": {1}}
    saved_with(tmp_path, model=torch.nn.BatchNorm1d(2), other=Plain(state))
    content = saved_content(tmp_path)
    assert content["other"] == state
    assert [type(value) for value in content["other"].values()] == [
        Counter,
        tuple,
        torch.Size,
        set,
    ]
    assert type(content["model"]) is OrderedDict
    assert content["model"]._metadata == torch.nn.BatchNorm1d(2).state_dict()._metadata


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


class Plain:
    """A part that has this state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Tagged(torch.Tensor):
    """A tensor of a class that loading does not know."""


def test_a_state_that_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(Error, match="schedule.*numpy.float64"):
        Checkpoint(directory=tmp_path, schedule=Plain({"lr": numpy.float64(0.1)})).save()
    part = Plain({"weight": torch.ones(2).as_subclass(Tagged)})
    checkpoint = Checkpoint(directory=tmp_path, part=part, on_error="stop")
    checkpoint.save()
    with pytest.raises(Error, match=r"step \d+ .* was not saved: .*cannot be loaded.*Tagged"):
        checkpoint.wait()
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_tensor_is_not_saved_as_if_it_were_the_whole(one_rank):
    network = torch.nn.Linear(4, 2)
    fully_shard(network)
    with pytest.raises(Error, match="state model.*weight.* is a DTensor.*Gather the whole"):
        copy_of(network.state_dict(), "model", {})


@pytest.mark.parametrize(
    "wrong",
    [{"on_error": "panic"}, {"keep": 0}, {"every_steps": -5}, {"every_steps": 2.5}],
    ids=str,
)
def test_wrong_options_and_parts_without_a_state_are_refused_at_once(tmp_path, wrong):
    with pytest.raises(Error, match="takes on_error='warn' or 'stop'"):
        Checkpoint(directory=tmp_path, model=torch.nn.Linear(1, 1), **wrong)
    with pytest.raises(Error, match="needs the sampler"):
        Checkpoint(directory=tmp_path, model=torch.nn.Linear(1, 1), every_steps=2)
    loader = torch.utils.data.DataLoader(range(4))
    for part in (0.5, loader, torch.utils.data.DistributedSampler(range(4), 1, 0)):
        with pytest.raises(Error, match=f"cannot save it: a {type(part).__name__} has no state"):
            Checkpoint(model=torch.nn.Linear(1, 1), it=part)
    with pytest.raises(Error, match="step.* is for a Checkpoint that has the sampler"):
        Checkpoint(model=torch.nn.Linear(1, 1)).step()
