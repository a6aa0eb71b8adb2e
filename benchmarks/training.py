"""Training: a step, a resume after a kill, a save, and two ranks beside one."""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import with_ddp
from measuring import compared, launched, left_in, row, take_turns
from measuring import with_torchrun as torchrun
from plain_torch import BATCHES
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

WARM_UP = 20  # steps before the clock starts


def measure(quick):
    with ddp.connect("local", workers=2) as client:
        ddp.launch(client, ddp.rank, directory=False)  # warm: torch is imported
        yield from step(client, steps=BATCHES * (1 if quick else 3), turns=2 if quick else 6)
        yield from resume(client, turns=2 if quick else 3)
        yield from save(client, turns=2 if quick else 8)
        yield from second_rank(client, steps=2 if quick else 8, turns=2 if quick else 3)


# A step


def step(client, steps, turns):
    """Many short turns, since a step's time differs from process to process (malloc)."""

    def mean(ranks):
        """Milliseconds of a step, after those that warm up."""
        spans = [rank["ended"][-1] - rank["ended"][WARM_UP - 1] for rank in ranks]
        return 1e3 * statistics.mean(spans) / (steps - WARM_UP)

    ours, theirs = take_turns(
        lambda: mean(launched(client, with_ddp.train, steps=steps)),
        lambda: mean(torchrun("train", steps, 0)),
        turns=turns,
    )
    what = f"mean of {steps - WARM_UP} steps of an LSTM, 512 samples each, ms"
    yield compared(what, ours, theirs, beside="torchrun, no reports", at_most=1.03)


# A resume


def resume(client, turns):
    weights = []

    def ours(**how):
        with tempfile.TemporaryDirectory() as folder:
            arguments = {"folder": folder, "directory": f"{folder}/run", "saves": True}
            run = ddp.launch(client, with_ddp.train, steps=BATCHES, **arguments, **how)
            weights.append(run.result)
            return left_in(folder, 2)

    def seconds(ranks):
        """From the kill to the first step after the restart."""
        return max(rank["ended"][0] - rank["killed"] for rank in ranks)

    ours()
    times = take_turns(
        lambda: seconds(ours(is_killed=True, restarts=1)),
        lambda: seconds(torchrun("train", BATCHES, 1, starts=2)),
        turns=turns,
    )
    what, beside = "from a kill to the first step after the restart, s", "torchrun, started again"
    yield compared(what, *times, beside=beside, speed_up=True, limit=2)
    undisturbed, *others = weights
    differing = sum(not torch.equal(each, undisturbed) for each in others)
    words = f"differ in {differing} of {turns}" if differing else "the same, bit for bit"
    yield row("weights of the killed runs and of an undisturbed one", words, "", "", "")


# A save


def save(client, turns):
    ours, plain = ddp.launch(client, saves, workers=1, turns=turns, directory=False).result
    what = "training stands still for a save of 100 MB, ms"
    yield compared(what, ours, plain, beside="torch.save there and then", at_most=0.2)


class State:
    """100 MB of float32."""

    def __init__(self):
        self.tensors = [torch.randn(2_500_000) for _ in range(10)]

    def state_dict(self):
        return {"tensors": self.tensors}

    def load_state_dict(self, state):
        self.tensors = state["tensors"]


def saves(turns):
    """Milliseconds of each save, ours and plain. The file is synced to the disk in both."""
    with tempfile.TemporaryDirectory() as folder:
        state = State()
        checkpoint = ddp.Checkpoint(directory=Path(folder) / "ours", state=state)

        def ours():
            began = time.perf_counter()
            checkpoint.save()
            took = time.perf_counter() - began
            checkpoint.wait()  # the rest is written while training goes on
            return 1e3 * took

        def plain():
            began = time.perf_counter()
            with open(Path(folder) / "plain.pt", "wb") as file:
                torch.save({"state": state.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
            return 1e3 * (time.perf_counter() - began)

        ours()  # the first one allocates
        return take_turns(ours, plain, turns=turns)


# Two ranks beside one


def second_rank(client, steps, turns):
    def seconds(ranks, averages=True):
        run = ddp.launch(
            client, resnet, workers=ranks, steps=steps, averages=averages, directory=False
        )
        return run.result

    seconds(2)
    two, one, apart = take_turns(
        lambda: seconds(2), lambda: seconds(1), lambda: seconds(2, averages=False), turns=turns
    )
    what = f"two ranks, {steps} steps of ResNet18, 64 images each, s"
    yield compared(what, two, one, beside="one rank", speed_up=True)
    beside = "two ranks that do not average gradients"
    yield compared(what, two, apart, beside=beside, speed_up=True, at_least=0.85)


def resnet(steps, averages):
    """Seconds that `steps` steps of 64 images of 64 x 64 pixels, of all ranks together, take."""
    import torchvision

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=21)
    model = DistributedDataParallel(model) if averages else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    share = 64 // ddp.world_size()
    images = torch.rand(share, 3, 64, 64)
    labels = torch.arange(share) % 21
    for step in range(2 + steps):
        if step == 2:  # the first two warm up
            began = time.perf_counter()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - began
