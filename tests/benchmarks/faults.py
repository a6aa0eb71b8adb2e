"""What failures and checkpoints cost, each beside what one would use without `ddp_common`.

    python tests/benchmarks/faults.py [--output FILE.json] [--only NAME]
                                      [--kills 100] [--saves 1000]

| name     | what                                                                               |
|----------|------------------------------------------------------------------------------------|
| notice   | a rank raises, or is killed: seconds until the caller knows, under launch, under   |
|          | torchrun, and in a plain Dask task on each worker (whose peers wait for the        |
|          | collective's own time-out)                                                         |
| kills    | one training run whose random ranks are killed at random times: the final weights  |
|          | against undisturbed ones                                                           |
| saves    | kill -9 at random moments of a loop that only saves: is there a good file, how old |
| recovery | from a kill to the first step after the restart                                    |
| cost     | seconds that training stands still for a save of a 100 MB state, against           |
|          | torch.save on the training thread                                                  |
"""

import argparse
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measuring
from measuring import REPOSITORY, compared, single

import ddp_common as ddp
from ddp_common.ranks import rendezvous

sys.path.insert(0, str(REPOSITORY / "tests"))

import fault_lab
from faults_on_purpose import struck_at, train
from ports import free_port

GIVE_UP = 10.0  # seconds after which a peer that still waits is taken to wait for its time-out
REPEATS = 5


def measure_notice(client, _):
    results = []
    for fault, name in (("raise", "a rank raises"), ("kill", "a rank is killed")):
        what = f"{name}, until the caller knows, s"
        ours = [under_launch(client, fault) for _ in range(REPEATS)]
        torchrun = [under_torchrun(client, fault) for _ in range(REPEATS)]
        results.append(
            compared("notice", what, ours, torchrun, alternative="torchrun", is_speed_up=True)
        )
        task = in_dask_tasks(client, fault)
        of_task = f"not within {GIVE_UP:g} s" if task is None else task
        results.append(single("notice", f"{name}, a plain Dask task on each worker, s", of_task))
    return results


def under_launch(client, fault):
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        try:
            ddp.launch(
                client,
                ddp.inject(train, fault, mark=mark),
                workers=2,
                directory=Path(folder) / "run",
            )
        except ddp.RankFailed:
            return time.time() - struck_at(mark)


def under_torchrun(client, fault):
    with tempfile.TemporaryDirectory() as folder:
        torchrun = "-m torch.distributed.run --nproc-per-node 2".split()
        meeting = "--rdzv-backend c10d --rdzv-endpoint localhost:0".split()
        rank = [__file__, "--rank-that-gets", fault, "--mark", f"{folder}/mark"]
        subprocess.run(
            [sys.executable, *torchrun, *meeting, *rank],
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return time.time() - struck_at(f"{folder}/mark")


def be_a_rank(fault, mark):
    with rendezvous.process_group():
        ddp.inject(train, fault, mark=mark)()


def in_dask_tasks(client, fault):
    """Ranks as plain tasks in the workers' processes, on a cluster that does not survive it."""
    import torch.distributed as dist
    from distributed import wait

    def task(rank, port, mark):
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )
        return ddp.inject(train, fault, mark=mark)()

    port = free_port()
    with tempfile.TemporaryDirectory() as folder, ddp.connect("local", workers=2) as other:
        other.run(lambda: logging.disable())  # what the workers would print of their tasks
        mark = Path(folder) / "mark"
        addresses = list(other.scheduler_info(n_workers=-1)["workers"])
        tasks = [
            other.submit(task, rank, port, str(mark), workers=[address], pure=False, retries=0)
            for rank, address in enumerate(addresses)
        ]
        while struck_at(mark) is None:
            time.sleep(0.01)
        try:
            wait(tasks, timeout=GIVE_UP)
            return time.time() - struck_at(mark)
        except TimeoutError:
            return None
        finally:
            for process in other.cluster.workers.values():
                if process.pid:
                    os.kill(process.pid, signal.SIGKILL)  # closing would wait for the tasks


def measure_kills(client, options):
    results = []
    for ranks in ((2,), (1, 2, 3)):
        with tempfile.TemporaryDirectory() as folder:
            survived = fault_lab.survive_kills(client, folder, options.kills, ranks)
        verdict = "identical"
        if not survived.identical:
            verdict = f"off by {survived.difference:.1e}"
        numbers = " or ".join(map(str, ranks))
        results.append(
            single("kills", f"weights after {survived.kills} kills on {numbers} ranks", verdict)
        )
    return results


SAVE_UNTIL_KILLED = """
import os, sys, torch
from ddp_common.ranks.checkpoint import Checkpoint
from ddp_common.ranks.sampling import ElasticSampler

def say(*words):
    line = " ".join(map(str, words)) + "\\n"
    os.write(1, line.encode())  # it is written whole or not at all

while True:
    child = os.fork()
    if child == 0:
        sampler = ElasticSampler(10**9, 1, shuffle=False)
        model = torch.nn.Linear(50, 50)
        checkpoint = Checkpoint(directory=sys.argv[1], model=model, sampler=sampler)
        checkpoint.restore()
        say("started", os.getpid())
        while True:
            sampler.step += 1
            checkpoint.save()
            checkpoint.wait()
            say("saved", sampler.step)
    os.waitpid(child, 0)
    say("dead")
"""


def measure_saves(_, options):
    """After every kill: the newest good file is that of the last confirmed save, or the next."""
    from ddp_common.ranks.checkpoint_files import newest, step_of

    saves = options.saves
    confirmed, none, old = 0, 0, 0
    chance = random.Random(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", SAVE_UNTIL_KILLED, folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process,
    ):
        for _ in range(saves):
            words = next(line.split() for line in process.stdout if line.startswith("started"))
            saved = next(line for line in process.stdout if line.startswith("saved"))
            confirmed = int(saved.split()[1])
            time.sleep(chance.random() * 0.004)
            os.kill(int(words[1]), signal.SIGKILL)
            for line in process.stdout:
                if line.startswith("dead"):
                    break
                if line.startswith("saved"):
                    confirmed = int(line.split()[1])
            path = newest(folder)
            none += path is None
            old += path is not None and step_of(path) < confirmed
        process.kill()
    return [
        single("saves", f"no good file after one of {saves} kills", none, at_most=0),
        single("saves", "a good file older than the last save", old, at_most=0),
    ]


def measure_recovery(client, _):
    with tempfile.TemporaryDirectory() as folder:
        seconds = [
            fault_lab.recovery(client, Path(folder) / str(number)) for number in range(REPEATS)
        ]
    what = "from a kill to the first step after the restart, s"
    return [single("recovery", what, statistics.median(seconds), at_most=2)]


def measure_cost(client, _):
    ours, plain = ddp.launch(client, save_100_mb, workers=2).result
    return [
        compared(
            "cost",
            "training stands still for a save of 100 MB, ms",
            [1e3 * seconds for seconds in ours],
            [1e3 * seconds for seconds in plain],
            alternative="torch.save there and then",
            at_most=0.2,
        )
    ]


def save_100_mb(saves=8):
    """Seconds of each save, ours and plain in turns.

    The state is 100 MB of float32; the file is synced in both.
    """
    import torch

    class State:
        def __init__(self):
            self.tensors = [torch.randn(2_500_000) for _ in range(10)]

        def state_dict(self):
            return {"tensors": self.tensors}

        def load_state_dict(self, state):
            self.tensors = state["tensors"]

    ours, plain, part = [], [], State()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ddp.Checkpoint(directory=Path(folder) / "ours", part=part)
        checkpoint.save()  # the first allocates
        for number in range(saves if ddp.rank() == 0 else 0):
            checkpoint.wait()
            began = time.perf_counter()
            checkpoint.save()
            ours.append(time.perf_counter() - began)
            checkpoint.wait()
            began = time.perf_counter()
            with open(Path(folder) / "plain.pt", "wb") as file:
                torch.save({"part": part.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
            plain.append(time.perf_counter() - began)
        checkpoint.wait()
    return ours, plain


def main():
    parser = measuring.command_line(__doc__, MEASURES, "faults")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--saves", type=int, default=1000)
    parser.add_argument("--rank-that-gets", help=argparse.SUPPRESS)
    parser.add_argument("--mark", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_that_gets:
        return be_a_rank(options.rank_that_gets, options.mark)
    machine = measuring.describe_machine()
    measuring.show_head(machine)
    with ddp.connect("local", workers=3) as client:
        ddp.launch(client, train)
        results = measuring.take(MEASURES, options.only, client, options)
    measuring.write(options.output, machine, results)


MEASURES = {
    "notice": measure_notice,
    "recovery": measure_recovery,
    "cost": measure_cost,
    "kills": measure_kills,
    "saves": measure_saves,
}


if __name__ == "__main__":
    main()
