"""Loader workers that Python's fork has let hang before 3.12, or that end as SIGTERM comes."""

import pytest
from processes import finished

from ddp_common import loader_workers

# The first process that is forked hangs where Python's own would: before its first line
PROGRAM = """
import os, pathlib, sys, time
import torch
import ddp_common as ddp
from ddp_common import loader_workers

loader_workers.FORK_TIMEOUT = 1
hang = pathlib.Path(sys.argv[1])

def in_child():
    if hang.exists():
        hang.unlink()
        time.sleep(1000)

os.register_at_fork(after_in_child=in_child)
sampler = ddp.ElasticSampler(8, batch_size=4)
data = torch.utils.data.TensorDataset(torch.arange(8))
loader = ddp.DataLoader(data, batch_sampler=sampler, num_workers=2)
for epoch in sampler.epochs(2):
    print(sum(len(x) for x, in loader))
"""


@pytest.mark.skipif(not loader_workers.MAY_HANG, reason="this Python has no such fault")
def test_a_loader_worker_that_hangs_at_its_start_is_forked_again(tmp_path):
    hang = tmp_path / "hang"
    hang.touch()
    assert finished("-c", PROGRAM, str(hang)).stdout.split() == ["8", "8"]
    assert not hang.exists()


# Each worker gets SIGTERM when its interpreter has let go of its handlers, and has not ended yet
ENDS = """
import os, signal, sys
import torch
import ddp_common as ddp
from ddp_common import stopping

class LastAct:
    def __init__(self):
        self.act = os.kill, os.getpid(), signal.SIGTERM

    def __del__(self):
        kill, *itself = self.act
        kill(*itself)

def begin(worker):
    sys.last_act = LastAct()

stopping.listen_to_sigterm()
data = torch.utils.data.TensorDataset(torch.arange(8))
options = dict(num_workers=2, multiprocessing_context="spawn", worker_init_fn=begin)
sampler = ddp.ElasticSampler(8, batch_size=4)
for epoch in sampler.epochs(1):
    print(sum(len(x) for x, in ddp.DataLoader(data, batch_sampler=sampler, **options)))
"""


def test_sigterm_ends_no_spawned_worker_that_is_about_to_end():
    ended = finished("-c", ENDS)
    assert (ended.stdout, ended.stderr) == ("8\n", "")
