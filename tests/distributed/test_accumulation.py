"""A run that is ended between two batches of one optimizer step loses no gradient."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from processes import saved_steps
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ADDED_UP = 4  # batches, for one step of the optimizer


def train(number=None, mark=None, with_no_sync=False, scales=False):
    """Sixteen batches, four steps. `number` is the signal that rank 0 gets once, in batch 6."""
    torch.manual_seed(0)
    x = torch.randn(160, 3)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=scales, init_scale=2.0**4)
    sampler = ddp.ElasticSampler(len(x), 20)
    parts = {"scaler": scaler} if scales else {}
    checkpoint = ddp.Checkpoint(
        model=model, optimizer=optimizer, sampler=sampler, every_steps=3, **parts
    )
    checkpoint.restore()
    for _ in sampler.epochs(2):
        for rows in sampler.batches():
            is_last = sampler.step % ADDED_UP == 0
            with model.no_sync() if with_no_sync and not is_last else contextlib.nullcontext():
                error = (model(x[rows]) - x[rows].sum(1, keepdim=True)).square().mean()
                scaler.scale(error * sampler.weight / ADDED_UP).backward()
            if is_last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if mark and ddp.rank() == 0 and sampler.step == 6 and not Path(mark).exists():
                checkpoint.wait()
                Path(mark).touch()
                os.kill(os.getpid(), number)
    return model.module.weight.detach(), model.module.bias.detach()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("options", [{}, {"with_no_sync": True, "scales": True}], ids=str)
def test_gradients_that_are_being_added_up_outlive_a_signal(client, tmp_path, number, options):
    whole = ddp.launch(client, train, workers=2, directory=False, **options)
    options = dict(options, workers=2, restarts=1, number=number, mark=str(tmp_path / "mark"))
    run = ddp.launch(client, train, directory=tmp_path / "run", **options)
    assert all(map(torch.equal, whole.result, run.result))
    assert len(run.failures) == 1 and not run.problems
    assert {step % ADDED_UP for step in saved_steps(tmp_path / "run")} == {0}
