"""The end of a run: whoever is held up there loses nothing.

What scripts for torchrun do there is harmless.
"""

import json
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

LAUNCHES = 6


def held_up(rank=None):
    """Return while another thread keeps the interpreter busy."""
    numbers = list(range(1_000_000))
    if rank in (None, ddp.rank()):
        for _ in range(2):
            threading.Thread(target=json.dumps, args=(numbers,), daemon=True).start()
    return ddp.rank()


@pytest.mark.parametrize("rank", [0, 1, None])
def test_a_rank_that_is_held_up_at_the_end_does_not_fail_a_finished_run(client, rank):
    runs = [ddp.launch(client, held_up, workers=2, rank=rank) for _ in range(LAUNCHES)]
    assert [run.result for run in runs] == [0] * LAUNCHES


def test_a_training_function_may_destroy_the_process_group_in_its_last_line(client, tmp_path):
    def train():
        total = torch.tensor([ddp.rank() + 1.0])
        dist.all_reduce(total)
        sampler = ddp.ElasticSampler(8, 4)
        checkpoint = ddp.Checkpoint(model=torch.nn.Linear(1, 1), sampler=sampler)
        for _ in sampler.epochs(1):
            for _ in sampler:
                ddp.report(loss=1.0)
        checkpoint.save()
        dist.destroy_process_group()
        ddp.report(last=ddp.rank())
        return ddp.rank(), ddp.world_size(), str(ddp.device()), total.item()

    run = ddp.launch(client, train, workers=2, directory=tmp_path / "run")
    assert run.result == (0, 2, str(torch.device("cpu")), 3.0)
    assert sorted(run.metrics["last"].dropna()) == [0, 1]
    assert len(list((tmp_path / "run" / "checkpoints").glob("*.pt"))) == 1


def test_it_may_do_so_right_after_its_last_backward(client):
    """In half of all launches torch hung there, when the model was freed."""

    def train():
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model(torch.ones(2, 1)).sum().backward()
        dist.destroy_process_group()
        return ddp.rank()

    runs = [ddp.launch(client, train, workers=2, stall_timeout=60) for _ in range(2 * LAUNCHES)]
    assert [run.result for run in runs] == [0] * len(runs)


def test_making_a_process_group_in_a_training_function_is_explained(client):
    def train():
        dist.init_process_group("gloo")

    words = "the process group is there already.*Remove that line"
    with pytest.raises(ddp.RankFailed, match=words):
        ddp.launch(client, train, workers=2)


SCRIPT = """
import sys
import torch, torch.distributed as dist
import ddp_common as ddp

def train():
    total = torch.tensor([ddp.rank() + 1.0])
    dist.all_reduce(total)
    ddp.report(total=total, at=ddp.rank())
    dist.destroy_process_group()
    return {"rank": ddp.rank(), "size": ddp.world_size(), "total": total}

with ddp.connect("torchrun") as client:
    run = ddp.launch(client, train, directory=sys.argv[1])
    assert run.result == {"rank": 0, "size": 2, "total": torch.tensor([3.0])}, run.result
    assert sorted(record["at"] for record in run.records) == [0, 1]
    print("good")
"""


def test_the_same_under_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            tmp_path / "script.py",
            tmp_path / "run",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"total": 3.0') == 2
