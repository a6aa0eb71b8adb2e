"""`ddp.trace`: where the time of a step goes."""

import sys

import cloudpickle
import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp
from ddp_common.run import timeline

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(steps):
    model = DistributedDataParallel(torch.nn.Linear(8, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


def trace_and_train():
    ddp.trace(steps=3)
    train(steps=8)


def test_a_few_steps_of_every_rank_are_recorded_and_drawn(client):
    drawn = ddp.launch(client, trace_and_train, workers=2).timeline()
    assert list(drawn.frame.index) == [0, 1]
    assert list(drawn.frame.columns) == list(timeline.LANES)
    assert drawn.picture.read_bytes().startswith(b"\x89PNG")
