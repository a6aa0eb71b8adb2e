"""Loops that are ended at any batch, and gone on with, end with the same weights, bit for bit."""

import contextlib

import pytest
import torch
from contract_loops import EPOCHS, LOOPS, train

from ddp_common.checkpoint_files import checkpoints


class Killed(Exception):
    """Training ends here, as it would by SIGKILL, but for what is being written."""


def killer(moment):
    """A function that raises `Killed` at its call of that number, and a list of its calls."""
    moments = []

    def strike(sampler):
        moments.append(sampler.steps_done)
        if len(moments) == moment:
            raise Killed

    return strike, moments


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_ends_with_the_same_weights_wherever_it_was_ended_on_the_way(tmp_path, name):
    count, moments = killer(None)
    whole = train(name, tmp_path / "whole", count)
    assert len(moments) >= 7 * EPOCHS
    for moment in range(1, len(moments) + 1, 2):
        run = tmp_path / str(moment)
        for again in (moment, moment // 2 + 1):
            strike, _ = killer(again)
            with contextlib.suppress(Killed):
                train(name, run, strike)
        assert checkpoints(run) or moment < 12
        assert torch.equal(train(name, run), whole), moment
