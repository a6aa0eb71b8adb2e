"""The end of a run: whoever is held up there loses nothing.

What scripts for torchrun do there is harmless.
"""

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from processes import saved_steps
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

LAUNCHES = 6


def test_a_training_function_may_destroy_the_process_group_in_its_last_line(client, tmp_path):
    def train():
        total = torch.tensor([ddp.rank() + 1.0])
        dist.all_reduce(total)
        sampler = ddp.ElasticSampler(8, 4)
        torch.manual_seed(0)
        checkpoint = ddp.Checkpoint(model=torch.nn.Linear(1, 1), sampler=sampler)
        checkpoint.restore()
        for _ in sampler.epochs(1):
            for _ in sampler.batches():
                ddp.report(loss=1.0)
                checkpoint.step()
        checkpoint.save()
        dist.destroy_process_group()
        ddp.report(last=ddp.rank())
        return ddp.rank(), ddp.world_size(), str(ddp.device()), total.item()

    run = ddp.launch(client, train, workers=2, directory=tmp_path / "run")
    assert run.result == (0, 2, str(torch.device("cpu")), 3.0)
    assert sorted(run.metrics["last"].dropna()) == [0, 1]
    assert saved_steps(tmp_path / "run") == [2]


def test_it_may_do_so_right_after_its_last_backward(client):
    """In half of all launches torch hung there, when the model was freed."""

    def train():
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model(torch.ones(2, 1)).sum().backward()
        dist.destroy_process_group()
        return ddp.rank()

    runs = [ddp.launch(client, train, workers=2, stall_timeout=PATIENCE) for _ in range(LAUNCHES)]
    assert [run.result for run in runs] == [0] * len(runs)


def test_making_a_process_group_again_joins_it_and_another_one_is_explained(client):
    def train(backend):
        dist.init_process_group(backend)
        dist.init_process_group(backend)
        return dist.get_world_size()

    assert ddp.launch(client, train, backend="gloo", workers=2).result == 2
    words = "default process group twice.*The process group is there already.*Remove"
    with pytest.raises(ddp.RankFailed, match=words):
        ddp.launch(client, train, backend="mpi", workers=2)
