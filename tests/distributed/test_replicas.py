"""Ranks whose models drift apart: each trains something else, and only rank 0's is kept."""

import sys

import cloudpickle
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp
from ddp_common.messages import ParameterNorms
from ddp_common.run.recorder import Replicas

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train():
    torch.manual_seed(0)
    data = torch.randn(96, 6)
    targets = data.sum(1, keepdim=True)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)  # what is unfrozen after it, it does not average
    net.requires_grad_(True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sampler = ddp.ElasticSampler(96, 32)
    checkpoint = ddp.Checkpoint(model=model, sampler=sampler)
    for epoch in sampler.epochs(2):
        for rows in sampler.batches():
            loss = mse_loss(model(data[rows]), targets[rows]) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        checkpoint.save()


def test_models_that_have_drifted_apart_are_named_in_the_run_s_problems(client, capfd):
    run = ddp.launch(client, train, workers=2)
    (problem,) = run.problems
    assert "have drifted apart: after step 3 the parameter model.0.weight has" in problem
    assert capfd.readouterr().err.count("have drifted apart") == 1


def test_rounding_and_models_that_diverged_together_are_no_problem():
    nan = float("nan")
    replicas = Replicas(world_size=2)
    assert replicas.take(0, ParameterNorms("", 3, [1.0, nan], ["a", "b"])) is None
    assert replicas.take(1, ParameterNorms("", 3, [1.000001, nan], [])) is None
    assert replicas.take(1, ParameterNorms("", 4, [1.0, 1.0], [])) is None  # rank 0 is behind
    apart = replicas.take(0, ParameterNorms("", 4, [1.0, nan], ["a", "b"]))
    assert "after step 4 the parameter b has the norm nan on rank 0 and 1 on rank 1" in apart
