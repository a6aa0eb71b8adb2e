"""What it takes to start: ranks against time on one machine, and jobs of a real Slurm.

    python tests/benchmarks/clusters.py [--output FILE.json] [--only NAME]

| name  | what                                                                                  |
|-------|---------------------------------------------------------------------------------------|
| ranks | 1 to 128 ranks (as many as memory allows): form a group, 10 steps of a tiny model,    |
|       | end; processor time of client and scheduler; a curve in runs/launch-time.png          |
| slurm | `make run CLUSTER=slurm` to the first step, beside the same tutorial in a job of       |
|       | `sbatch` whose ranks `srun` starts, and beyond what `srun hostname` takes; a second    |
|       | launch on the same jobs                                                               |
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measuring
import psutil
from measuring import REPOSITORY, compared, single

import ddp_common as ddp

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MEMORY = 0.1  # GiB that a worker takes with its forkserver and its rank; 0.06 as measured below
REPEATS = 5
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "hpc")]


def ten_steps():
    """Train a tiny model; returns when (s since 1970) this rank had its group, and its steps."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    formed = time.time()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.barrier()
    return formed, time.time()


def one_launch(client, ranks):
    """Seconds from the call.

    Until rank 0 has its group, until all have made ten steps, until the call returns; and the
    processor time of this process, the client and the scheduler, for each rank.
    """
    began, busy = time.time(), time.process_time()
    formed, trained = ddp.launch(client, ten_steps, workers=ranks).result
    return {
        "group": formed - began,
        "steps": trained - began,
        "end": time.time() - began,
        "processor": (time.process_time() - busy) / ranks,
    }


def measure_ranks():
    free = gibibytes_available()
    affordable = int((free - 2) / MEMORY)
    sizes = [size for size in SIZES if size <= affordable]
    most = sizes[-1]
    print(
        f"ranks      {psutil.cpu_count()} cores, {free:.0f} GiB free: up to {most} ranks",
        flush=True,
    )
    began = time.monotonic()
    curve = {}
    with ddp.connect("local", workers=most) as client:
        one_launch(client, most)
        seconds = time.monotonic() - began
        each = (free - gibibytes_available()) / most
        results = [
            single("workers", f"{most} workers started, torch imported in each, s", seconds),
            single("workers", "a worker with its forkserver and rank, GiB", each),
        ]
        for size in sizes:
            launches = [one_launch(client, size) for _ in range(REPEATS)]
            times = {
                what: statistics.median(launch[what] for launch in launches)
                for what in launches[0]
            }
            curve[size] = times
            results += [
                single("ranks", f"{size}: the group is formed, s", times["group"]),
                single("ranks", f"{size}: 10 steps are made, s", times["steps"]),
                single("ranks", f"{size}: launch returns, s", times["end"]),
                single(
                    "ranks",
                    f"{size}: processor of client and scheduler, ms a rank",
                    1e3 * times["processor"],
                ),
            ]
    draw(curve, REPOSITORY / "runs" / "launch-time.png")
    return results


def gibibytes_available():
    return psutil.virtual_memory().available / 2**30


def draw(curve, path):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for what, label in (
        ("group", "the process group is formed"),
        ("steps", "10 steps are made"),
        ("end", "launch returns"),
    ):
        axes.plot(list(curve), [times[what] for times in curve.values()], marker="o", label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="ranks",
        ylabel="seconds since launch was called",
        title=f"Launch time, warm, one machine with {psutil.cpu_count()} cores",
    )
    axes.set_xticks(list(curve), [str(size) for size in curve])
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def measure_slurm():
    from slurm_here import running_slurm, why_not

    if reason := why_not():
        return [single("slurm", "a real Slurm", f"not measured: {reason}")]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        folder.chmod(0o755)
        with running_slurm(folder / "slurm") as variables:
            os.environ.update(variables, OPTIONS="cores=1 memory=1GiB", RUNS=str(folder / "runs"))
            turns = [
                (
                    hostname(),
                    first_step_of_sbatch(folder / f"sbatch-{number}"),
                    first_step(folder / f"run-{number}"),
                )
                for number in range(3)
            ]
            with ddp.connect("slurm", workers=2) as client:
                ddp.launch(client, ten_steps)
                again = [one_launch(client, 2)["steps"] for _ in range(REPEATS)]
    bare, theirs, ours = zip(*turns)
    beyond = statistics.median(mine - other for mine, other in zip(ours, bare))
    return [
        compared(
            "slurm",
            "make run, from the command to the first step, s",
            ours,
            theirs,
            alternative="sbatch and srun, no Dask",
            at_most=1.5,
        ),
        single("slurm", "the same, beyond what `srun hostname` takes, s", beyond, at_most=20),
        single("slurm", "`srun hostname`, s", statistics.median(bare)),
        single(
            "slurm",
            "a second launch on the same jobs, to its tenth step, s",
            statistics.median(again),
            at_most=0.5,
        ),
    ]


def hostname():
    began = time.time()
    subprocess.run(["srun", "--ntasks=2", "hostname"], check=True, capture_output=True)
    return time.time() - began


def first_step(run):
    """Seconds from `python -m ddp_common run pets --cluster slurm` to its first step's report."""
    return seconds_to_first_step(run, "python -m ddp_common run pets --cluster slurm --workers 2")


def first_step_of_sbatch(run):
    """Seconds from `sbatch` to the first step's report of ranks that `srun` starts in a job."""
    return seconds_to_first_step(
        run,
        "sbatch --wait --ntasks=2 --cpus-per-task=1 --mem=2G --output=/dev/null",
        "--wrap",
        f"srun --kill-on-bad-exit=1 {sys.executable} -m ddp_common run pets",
    )


def seconds_to_first_step(run, command, *arguments):
    words = command.replace("python", sys.executable, 1).split()
    settings = {"CHECKPOINT": str(run), "SET": "epochs=1 hidden=16 batch_size=2048"}
    began = time.time()
    subprocess.run(
        [*words, *arguments],
        check=True,
        capture_output=True,
        cwd=REPOSITORY,
        env={**os.environ, **settings},
    )
    with open(run / "metrics.jsonl") as lines:
        return min(json.loads(line)["time"] for line in lines) - began


MEASURES = {"ranks": measure_ranks, "slurm": measure_slurm}


if __name__ == "__main__":
    measuring.main(__doc__, MEASURES, "clusters")
