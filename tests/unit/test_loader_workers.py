"""Loader workers that Python's fork has let hang, which it may do before 3.12."""

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
