"""SIGTERM to all processes of a run, DataLoader workers among them: the ranks save and leave.

torchrun hands it on to the process group of each rank, Slurm to all processes of a step.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from processes import is_alive, wait_until

from ddp_common.ranks.checkpoint_files import checkpoints, step_of

SCRIPT = Path(__file__).parents[1] / "trains_with_loader_workers.py"


def start(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, "--nproc-per-node", "2", str(SCRIPT)],
        env={**os.environ, "RUN_DIRECTORY": str(tmp_path / "run")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ranks_with_loader_workers_save_and_leave_after_the_same_step(tmp_path):
    process = start(tmp_path)
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints") or process.poll() is not None)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=150)
    assert process.returncode != 0
    step = re.search(r"told to stop \(SIGTERM\). They left after step (\d+)", said)
    assert step, said
    newest = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert step_of(newest) == int(step[1])
    assert "DataLoader worker" not in said
    wait_until(lambda: not any(is_alive(each.pid) for each in started))


def test_a_worker_that_alone_gets_sigterm_ends_as_ever(tmp_path):
    process = start(tmp_path)
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints") or process.poll() is not None)
    (rank, _) = psutil.Process(process.pid).children()
    rank.children()[0].terminate()
    said, _ = process.communicate(timeout=150)
    assert process.returncode != 0
    assert re.search(r"DataLoader worker \(pid \d+\) is killed by signal: Terminated", said), said
