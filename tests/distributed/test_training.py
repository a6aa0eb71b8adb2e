"""Training to the end: the same on any number of ranks, and the same when it was resumed."""

import os
import signal
import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from processes import assert_nothing_left
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp
from ddp_common.checkpoint_files import step_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SAMPLES, BATCH, EPOCHS = 103, 16, 3  # 7 steps an epoch, the last one ragged
SAVED, DIES = 10, 12  # steps, of 21: both in the middle of the second epoch


def train(dying_rank=None):
    torch.manual_seed(0)
    data = torch.randn(SAMPLES, 8)
    targets = data.square().sum(1, keepdim=True)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = ddp.ElasticSampler(SAMPLES, BATCH, seed=1)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler)
    resumed = checkpoint.restore()
    steps = 0
    for epoch in sampler.epochs(EPOCHS):
        for indices in sampler.batches():
            loss = (
                torch.nn.functional.mse_loss(model(data[indices]), targets[indices])
                * sampler.weight
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)
            steps += 1
            if steps == SAVED and resumed is None:
                checkpoint.save()
                checkpoint.wait()  # it is on disk before the rank dies
            if steps == DIES and resumed is None and ddp.rank() == dying_rank:
                os.kill(os.getpid(), signal.SIGKILL)
    model.eval()
    with torch.no_grad():
        final = torch.nn.functional.mse_loss(model.module(data), targets)
    return {
        "steps": steps,
        "resumed": resumed and step_of(resumed),
        "loss": final,
        "weights": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
    }


def interrupted(client, ranks, dying_rank):
    """The directory of a run whose `dying_rank` was killed."""
    with pytest.raises(ddp.RankFailed, match="SIGKILL") as caught:
        ddp.launch(client, train, workers=ranks, dying_rank=dying_rank)
    assert caught.value.rank == dying_rank
    assert_nothing_left(caught.value.directory, ranks=ranks)
    return caught.value.directory


def resumed(client, directory, ranks):
    """The result of going on in `directory`."""
    run = ddp.launch(client, train, workers=ranks, directory=directory)
    assert run.directory == directory
    assert (run.result["resumed"], run.result["steps"]) == (SAVED, 7 * EPOCHS - SAVED)
    return run


def relative_difference(one, other):
    return ((one - other).norm() / other.norm()).item()


def assert_equal_up_to_rounding(one, other):
    assert relative_difference(one["loss"], other["loss"]) < 1e-6
    assert relative_difference(one["weights"], other["weights"]) < 1e-6


@pytest.fixture(scope="module")
def uninterrupted(client, tmp_path_factory):
    """The result of training on one rank."""
    return ddp.launch(client, train, workers=1, directory=tmp_path_factory.mktemp("run")).result


def test_the_final_loss_and_weights_are_those_of_a_single_rank(client, uninterrupted):
    several = ddp.launch(client, train, workers=3).result
    assert uninterrupted["resumed"] is None
    assert several["steps"] == uninterrupted["steps"] == 7 * EPOCHS
    assert_equal_up_to_rounding(several, uninterrupted)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_run_resumed_on_another_number_of_ranks_ends_with_the_same_weights(
    client, uninterrupted, before, after
):
    directory = interrupted(client, ranks=before, dying_rank=1)
    run = resumed(client, directory, ranks=after)
    assert_equal_up_to_rounding(run.result, uninterrupted)
    assert set(run.metrics["step"]) == set(range(1, 7 * EPOCHS + 1))  # of both attempts


def how_many_classes(images):
    """Uses a name that torch has as well, for something that is no module: torch.classes."""
    return len(images.classes) if torch.is_tensor(images.table) else None


def test_a_function_may_use_an_attribute_called_classes(client):
    images = SimpleNamespace(classes=["beagle", "pug"], table=torch.zeros(1))
    assert ddp.launch(client, how_many_classes, images=images, workers=1).result == 2


def seeded():
    """As most published code does it."""
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    return torch.rand(1).item()


def test_a_function_may_set_what_is_in_torch_backends(client):
    assert ddp.launch(client, seeded, workers=1).result == seeded()


def trains_alone():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if ddp.world_size() == 3:
        dist.barrier()


def test_ranks_that_have_trained_without_a_word_to_each_other_are_a_problem(client):
    (problem,) = ddp.launch(client, trains_alone, workers=2).problems
    assert "Each rank has trained alone" in problem
    assert not ddp.launch(client, trains_alone, workers=3).problems
    assert not ddp.launch(client, trains_alone, workers=1).problems
