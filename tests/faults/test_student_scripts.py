"""A script of a student's ends in time, with all that it has started, whatever it does."""

import re

import pytest
from patience import PATIENCE
from processes import assert_gone, is_alive

from tutorials.checks.common import run_script

TIMEOUT = 3 * PATIENCE

ENDS_AFTER_BACKWARD = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}, {sys.argv[1:]}")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.ones(2, 1)).sum().backward()
    dist.destroy_process_group()

main()
"""


def test_a_right_script_that_ends_its_group_right_after_a_backward_is_not_called_failed():
    for _ in range(4):  # torch hangs there, or aborts, in some runs only
        run = run_script(ENDS_AFTER_BACKWARD, "--epochs", "1", timeout=TIMEOUT)
        assert run.ok and run.ended_because == "", run.output
        assert run.printed == [f"rank {rank} of 2, ['--epochs', '1']\n" for rank in (0, 1)]


ONE_FAILS = """
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()  # both ranks are there
if dist.get_rank() == 1:
    raise ValueError("no such digit")
dist.barrier()
"""


def test_an_error_of_one_rank_is_in_the_output_with_its_line_and_the_other_rank_ends():
    run = run_script(ONE_FAILS, timeout=TIMEOUT)
    assert not run.ok and run.exit_code == 1 and run.ended_because == ""
    assert "[rank1]: ValueError: no such digit" in run.output.splitlines()
    assert 'script.py", line 7, in <module>' in run.printed[1]
    assert "as_rank" not in run.printed[1]


LEAVES_DAEMONS = """
import os, subprocess, sys, time
import psutil

daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"
subprocess.run([sys.executable, "-c", daemon])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
mark = os.environ["DDP_CHECK"]  # which all have inherited
found = psutil.process_iter(["environ"])
pids = [each.pid for each in found if (each.info["environ"] or {}).get("DDP_CHECK") == mark]
print("started", *pids, flush=True)
"""


@pytest.mark.parametrize(
    ("end", "timeout", "why"),
    [
        ("sys.exit(0)", TIMEOUT, ""),
        ("while True: time.sleep(1)", PATIENCE / 2, f"It was ended after {PATIENCE / 2:g} s."),
        ("while True: print('y' * 1000)", TIMEOUT, "It was ended after it had printed 50 MB."),
    ],
    ids=["ends", "loops", "prints"],
)
def test_nothing_that_a_script_has_started_is_left_when_it(end, timeout, why):
    run = run_script(LEAVES_DAEMONS + end, ranks=1, timeout=timeout)
    assert (run.ok, run.ended_because) == (not why, why)
    started = re.search(r"started ([\d ]+)", run.output)
    assert started, run.output
    pids = [int(pid) for pid in started[1].split()]
    assert len(pids) >= 4  # torchrun, the rank, a process with a session of its own, a daemon
    assert_gone(lambda: [pid for pid in pids if is_alive(pid)])
    assert len(run.output) < 40_000
