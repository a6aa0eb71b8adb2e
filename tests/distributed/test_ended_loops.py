"""Loops of two ranks that are ended by a signal, again and again, lose nothing."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from contract_loops import LOOPS, train

import ddp_common as ddp

ENDS = 4  # of each run


class Strikes:
    """Signals for a rank at some moment of an attempt, one after the other: the same each time."""

    def __init__(self, folder, numbers, seed):
        chance = random.Random(seed)
        self.folder = Path(folder)
        self.plan = [
            (chance.randrange(2), chance.randint(1, 6), number) for number in numbers
        ]  # rank, moment, signal
        self.moments = 0

    def __call__(self, sampler):
        self.moments += 1
        time.sleep(0.01)  # so that the other rank hears of a SIGTERM before the last step
        struck = len(list(self.folder.iterdir()))
        if struck == len(self.plan):
            return
        rank, moment, number = self.plan[struck]
        if ddp.rank() == rank and self.moments >= moment:
            self.folder.joinpath(str(struck)).touch()
            os.kill(os.getpid(), number)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_ends_with_the_weights_of_an_undisturbed_one(client, tmp_path, name):
    whole = ddp.launch(client, train, workers=2, directory=False, name=name)
    marks = tmp_path / "marks"
    marks.mkdir()
    numbers = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM]
    strike = Strikes(marks, numbers, seed=name)
    options = dict(workers=2, restarts=ENDS, directory=tmp_path / "run")
    run = ddp.launch(client, train, name=name, strike=strike, **options)
    assert torch.equal(run.result, whole.result)
    assert len(list(marks.iterdir())) == ENDS and not run.problems
    assert len(run.failures) >= numbers.count(signal.SIGKILL)  # SIGTERM may come too late
