"""Under torchrun, ranks that wait for each other say where and who is to blame, and end."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from processes import wait_until

STALL_TIMEOUT = 6.0  # seconds: a rank that a busy machine holds up is not one of these
HEAD = f"""
import os
import signal
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first one imports torch's compiler


def train():
    for step in range(6):
        dist.all_reduce(torch.ones(4))
        if go_wrong(step):
            return


def main():
    with ddp.connect() as client:
        run = ddp.launch(
            client, train, stall_timeout={STALL_TIMEOUT}, directory=os.environ["RUN_DIRECTORY"]
        )
        if ddp.rank() == 0:
            print("the end", run.world_size, flush=True)
"""


def start(tmp_path, wrong, *options):
    """torchrun with a script whose ranks do `wrong` after each step; what it says is in stdout."""
    script = tmp_path / "script.py"
    function = f"\n\ndef go_wrong(step):\n{textwrap.indent(textwrap.dedent(wrong), '    ')}\n"
    script.write_text(f"{HEAD}{function}\n\nif __name__ == '__main__':\n    main()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *options, str(script)]
    return subprocess.Popen(
        command,
        env={**os.environ, "RUN_DIRECTORY": str(tmp_path / "run")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def under_torchrun(tmp_path, wrong, *options):
    """(exit code, all that it said) of such a script."""
    process = start(tmp_path, wrong, *options)
    said, _ = process.communicate(timeout=150)
    return process.returncode, said


def log_of(tmp_path):
    return (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_under_a_condition_is_named_with_its_line(tmp_path, rank):
    wrong = f"if step == 3 and ddp.rank() == {rank}:\n    dist.barrier()"
    code, said = under_torchrun(tmp_path, wrong)
    assert code != 0
    line = r"\(script.py:\d+\)"
    headline = (
        rf"Rank {rank} of 2 on \S+ stalled: no progress for 6 s\. "
        rf"It has called barrier #\d+ {line}, while rank {1 - rank} called "
        rf"all_reduce #\d+ of 4 floats {line}\. .*condition on the rank"
    )
    assert len(re.findall(headline, said)) == 1, said
    assert re.search(headline, log_of(tmp_path))
    assert f"rank {rank} has begun barrier #" in said
    assert 'script.py", line' in said and " in go_wrong" in said
    assert "in _run_here" not in said  # of the stacks, what is the user's
    assert "the end" not in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_elsewhere_is_named(tmp_path, rank):
    wrong = f"if step == 3 and ddp.rank() == {rank}:\n    threading.Event().wait()"
    code, said = under_torchrun(tmp_path, wrong)
    assert code != 0
    assert f"Rank {rank} of 2 on " in said
    assert "It is not in a collective at step 0; the others wait for it there." in said
    assert f"Rank {1 - rank} waits in all_reduce #" in said


def test_a_rank_that_returns_too_soon_is_named(tmp_path):
    code, said = under_torchrun(tmp_path, "return step == 3 and ddp.rank() == 1")
    assert code != 0
    assert "Rank 1 of 2 on " in said
    assert "Its function returned at step 0, while rank 0 went on and waits for it." in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_answers_nothing_and_is_named(tmp_path, rank):
    """Once that is said it is killed here: torchrun would wait half a minute for it to end."""
    pid = tmp_path / "pid"
    wrong = f"""
        if step == 3 and ddp.rank() == {rank}:
            open({str(pid)!r}, "w").write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    process = start(tmp_path, wrong)
    said = ""
    try:
        for line in process.stdout:
            said += line
            if "does not answer" in line:
                os.kill(int(pid.read_text()), signal.SIGKILL)
        assert process.wait(timeout=100) != 0
    finally:  # where that was never said, and this test has run out of time
        if process.poll() is None:
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
            process.kill()
    if rank == 1:
        assert "Rank 1 of 2 stalled: no progress for 6 s. Its process does not answer" in said
    else:
        assert "Rank 1 stalled: no progress for 6 s, and rank 0, which holds the store" in said
    assert " in train" in said  # where the other one is


def test_torchrun_starts_them_again(tmp_path):
    mark = tmp_path / "mark"
    wrong = f"""
        if step == 3 and ddp.rank() == 1 and not os.path.exists({str(mark)!r}):
            open({str(mark)!r}, "w").close()
            dist.barrier()
    """
    code, said = under_torchrun(tmp_path, wrong, "--max-restarts=1")
    assert code == 0, said
    assert "It has called barrier" in said
    assert "the end 2" in said


def test_ranks_that_make_progress_are_left_alone(tmp_path):
    wrong = "import time; ddp.report(step=step); time.sleep(2)"
    code, said = under_torchrun(tmp_path, wrong)
    assert (code, "stalled" in said) == (0, False), said


def test_ranks_that_were_suspended_together_go_on(tmp_path):
    process = start(tmp_path, "import time; ddp.report(step=step); time.sleep(1)")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text())
    ranks = psutil.Process(process.pid).children()
    for rank in ranks:
        rank.suspend()
    time.sleep(STALL_TIMEOUT + 2)
    for rank in ranks:
        rank.resume()
    said, _ = process.communicate(timeout=150)
    assert (process.returncode, "stalled" in said) == (0, False), said


def test_an_optimizer_without_a_sampler_is_progress(tmp_path):
    wrong = """
        import time
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        optimizer.step()
        time.sleep(2)
    """
    code, said = under_torchrun(tmp_path, wrong)
    assert (code, "stalled" in said) == (0, False), said
