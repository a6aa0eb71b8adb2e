"""A script of a student's ends in time, with all that it has started, whatever it does."""

import re
import textwrap

from patience import PATIENCE
from processes import assert_gone, is_alive

import ddp_common as ddp

JOINS = """
import os, sys
import torch.distributed as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()} {sys.argv[1:]}")
dist.barrier()  # a rank that leaves at once may break the group that its peer is still joining
"""


def test_an_error_of_one_rank_is_in_the_output():
    run = ddp.run_script(JOINS + "if dist.get_rank() == 1: raise ValueError('no such digit')\n")
    assert not run.ok and not run.timed_out
    assert re.search(r"\[rank1\]:.* ValueError: no such digit", run.output)


LEAVES_CHILDREN = textwrap.dedent("""
    import subprocess, sys, time
    pids = [subprocess.Popen(["sleep", "1000"], start_new_session=new).pid for new in (0, 1)]
    print("started {} {}".format(*pids))
    print("x" * 2**20, flush=True)
    time.sleep(1000)
""")


def test_nothing_that_it_has_started_is_left_when_it_ends_or_is_ended():
    run = ddp.run_script(LEAVES_CHILDREN, ranks=1, timeout=PATIENCE / 4)
    assert run.timed_out
    started = re.search(r"started (\d+) (\d+)", run.output)
    assert started, run.output
    pids = [int(pid) for pid in started.groups()]
    assert_gone(lambda: [pid for pid in pids if is_alive(pid)])
    assert "characters left out" in run.output and len(run.output) < 21_000
