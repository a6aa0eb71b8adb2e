"""How fast and how small `ddp_common` is, beside what one would use without it.

    python tests/benchmarks/bench.py [--output FILE.json] [--only NAME]

| name    | ours                                           | other                              |
|---------|------------------------------------------------|------------------------------------|
| launch  | `ddp.launch` on a warm cluster until both      | the same from starting torchrun    |
|         | ranks have finished their first backward (s)   |                                    |
| step    | mean training step under `ddp.launch`, reports | the same code under torchrun,      |
|         | sent                                           | reports dropped                    |
| windows | (8 characters -> next) of all pet names, with  | equal tensors out of Python lists, |
|         | NumPy                                          | item by item                       |
| loader  | one epoch over them, one index operation per   | one per item, and the default      |
|         | batch                                          | collate                            |
| memory  | a rank after its first backward                | a process that has only imported   |
|         |                                                | torch                              |
| cold    | a script that connects and launches, from its  | the same from starting torchrun    |
|         | start until both first backwards (s)           |                                    |

Both are measured in the same run. They take turns, and the table has the medians; the JSON file
has every single value. `ratio` is other / ours where the goal is to be faster, ours / other where
it is to add little: the median of the ratios of single turns, because what else the machine does
falls on both halves of a turn. `quartiles` are those of the same ratios: where they lie far apart,
the verdict is luck. A goal is met or missed; the exit code is 0 either way. Nothing else should
run on the machine: `load` says what did when the run began.

Memory: USS is what a process has for itself alone; PSS adds its part of what it shares. A rank
shares torch with the forkserver that it was forked from, so the row that counts both is the price
of a rank on a worker that has no other.
"""

import contextlib
import csv
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
from measuring import REPOSITORY, compared, single, take_turns, timed

import ddp_common as ddp

NAMES = REPOSITORY / "data" / "pets" / "names.csv"
RANKS = Path(__file__).with_name("ranks.py")
ALPHABET = "*+abcdefghijklmnopqrstuvwxyz-. "  # '*' pads the beginning, '+' ends a name
# before Dask's nanny adds to this process's what would slow torchrun down
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LOADER_BATCH = 16_384
STEPS = 100  # of each repetition, after those that warm up


# Launch, step, memory: two ranks, under ddp.launch and under torchrun


def measure_launch(client):
    """A first time of each does not count: it fills forkserver and page cache with torch."""
    for launcher in (under_launch, under_torchrun):
        launcher(client, "first_backward")
    seconds = take_turns(
        lambda: seconds_to_backward(under_launch, client),
        lambda: seconds_to_backward(under_torchrun, client),
        turns=5,
    )
    faster = compared(
        "launch",
        "warm, until both ranks' first backward, s",
        *seconds,
        alternative="torchrun",
        at_least=15,
        is_speed_up=True,
    )
    limit = single("launch", "the same, as a number of seconds", faster["ours"], at_most=0.3)
    return [faster, limit]


def measure_step(client):
    """Many short turns.

    malloc's own thresholds come out differently in every process, and with them a third of a step.
    """
    ours, other = take_turns(
        lambda: under_launch(client, "steps", count=STEPS),
        lambda: under_torchrun(client, "steps", count=STEPS),
        turns=8,
    )

    def milliseconds(kind, turns):
        return [statistics.mean(rank[kind] for rank in turn) * 1e3 for turn in turns]

    mean = compared(
        "step",
        f"mean of {STEPS} steps of 512 windows, ms",
        milliseconds("seconds", ours),
        milliseconds("seconds", other),
        alternative="torchrun, no reports",
        at_most=1.03,
    )
    processor = compared(
        "step",
        "processor time of the same, ms",
        milliseconds("cpu", ours),
        milliseconds("cpu", other),
        alternative="torchrun, no reports",
    )
    return [mean, processor]


def measure_memory(client):
    """The bare process lives as long as the ranks, since files in memory are shared by all.

    It is looked at in the same moment.
    """
    with bare_torch() as bare:
        looks = [rank for _ in range(3) for rank in under_launch(client, "memory", bare=bare)]

    def megabytes(kind, *processes):
        return [sum(each[process][kind] for process in processes) / 1e6 for each in looks]

    bare_pss, bare_uss = megabytes("pss", "bare"), megabytes("uss", "bare")
    with_forkserver = megabytes("pss", "rank", "forkserver")
    alternative = "a process that has imported torch"
    return [
        compared("memory", what, ours, other, alternative=alternative)
        for what, ours, other in (
            ("PSS of a rank, MB", megabytes("pss", "rank"), bare_pss),
            ("PSS of a rank and its forkserver, MB", with_forkserver, bare_pss),
            ("USS of a rank, MB", megabytes("uss", "rank"), bare_uss),
        )
    ]


def seconds_to_backward(launcher, client):
    began = time.time()
    return max(rank["finished"] for rank in launcher(client, "first_backward")) - began


def under_launch(client, name, **arguments):
    """Run a function of `ranks` on both workers; returns what each rank left."""
    import ranks

    with tempfile.TemporaryDirectory() as folder:
        ddp.launch(
            client, getattr(ranks, name), directory=f"{folder}/run", folder=folder, **arguments
        )
        return left_in(folder)


def under_torchrun(_, name, **arguments):
    """Run a function of `ranks` in both ranks of a torchrun; returns what each rank left."""
    torchrun = "-m torch.distributed.run --nproc-per-node 2".split()
    meeting = "--rdzv-backend c10d --rdzv-endpoint localhost:0".split()
    command = [sys.executable, *torchrun, *meeting, str(RANKS), name]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, folder, *map(str, arguments.values())],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        # seen once in forty: a rank aborts while its interpreter shuts down, after the measurement
        if done.returncode:
            said = done.stderr.splitlines()[:1]
            print(f"torchrun left with exit code {done.returncode}: {said}", file=sys.stderr)
        try:
            return left_in(folder)
        except OSError:
            raise SystemExit(
                f"and before the ranks had measured anything:\n{done.stderr}"
            ) from None


def left_in(folder):
    return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]


@contextlib.contextmanager
def bare_torch():
    """The process id of a Python that has imported torch and waits."""
    program = "import sys, torch; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


# Windows, loader: the data of the pets tutorial, without ranks


def measure_windows():
    import torch

    names = read_names()
    for ours, other in zip(windows(names), windows_item_by_item(names)):
        assert torch.equal(ours.long(), other), "the two ways disagree"
    seconds = take_turns(
        lambda: timed(windows, names), lambda: timed(windows_item_by_item, names), turns=3
    )
    what = f"windows of {len(names):,} names, s"
    return [
        compared(
            "windows", what, *seconds, alternative="Python lists", at_least=100, is_speed_up=True
        )
    ]


def measure_loader():
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)  # as in a rank
    contexts, targets = windows(read_names())
    batches, items = Batches(contexts, targets), Items(contexts.long(), targets.long())

    def by_batch():
        sampler = ddp.ElasticSampler(len(batches), LOADER_BATCH)
        loader = DataLoader(batches, batch_sampler=sampler, collate_fn=lambda batch: batch)
        return sum(len(y) for _, y in loader)

    def by_item():
        loader = DataLoader(items, batch_size=LOADER_BATCH, shuffle=True)
        return sum(len(y) for _, y in loader)

    assert by_batch() == by_item() == len(contexts)
    seconds = take_turns(lambda: timed(by_batch), lambda: timed(by_item), turns=3)
    what = f"an epoch of {len(contexts):,} windows, s"
    return [
        compared(
            "loader", what, *seconds, alternative="item by item", at_least=10, is_speed_up=True
        )
    ]


def read_names():
    """Every registered name, as often as it was registered."""
    with NAMES.open(encoding="utf-8", newline="") as file:
        return [row["name"] for row in csv.DictReader(file) for _ in range(int(row["count"]))]


def windows(names, width=8):
    """Contexts (n, width) and the characters that follow (n,), both uint8 indices into ALPHABET.

    There is no loop over names.
    """
    import numpy as np
    import torch

    index_of = np.zeros(256, np.uint8)
    index_of[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))
    padding = "*" * width
    text = padding + f"+{padding}".join(names) + "+"
    codes = index_of[np.frombuffer(text.encode(), np.uint8)]
    followers = codes[width:]  # one for every window but the last
    wanted = followers != ALPHABET.index("*")
    contexts = np.lib.stride_tricks.sliding_window_view(codes, width)[:-1]
    return torch.from_numpy(contexts[wanted]), torch.from_numpy(followers[wanted])


def windows_item_by_item(names, width=8):
    """The same, int64, as the original experiment went about it.

    That is a list for every window, a search for every character.
    """
    import torch

    alphabet = list(ALPHABET)
    contexts, targets = [], []
    for name in names:
        letters = list(name) + ["+"]
        for position, letter in enumerate(letters):
            seen = letters[max(0, position - width) : position]
            padded = ["*"] * (width - len(seen)) + seen
            contexts.append([alphabet.index(character) for character in padded])
            targets.append(alphabet.index(letter))
    return torch.tensor(contexts), torch.tensor(targets)


class Items:
    """A data set that gives one sample at a time."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return tuple(tensor[index] for tensor in self.tensors)


class Batches(Items):
    """A data set that gives a whole batch at once, and only then widens it to int64."""

    def __getitems__(self, indices):
        return tuple(tensor[indices].long() for tensor in self.tensors)


# Cold: a script from its start


def measure_cold():
    """Processor time is that of the whole machine: what a cluster starts is nobody's child."""
    for launcher in (under_script, under_torchrun):
        launcher(None, "first_backward")

    def cold(launcher):
        began, busy = time.time(), processor_seconds()
        finished = max(rank["finished"] for rank in launcher(None, "first_backward"))
        return finished - began, processor_seconds() - busy

    ours, other = take_turns(lambda: cold(under_script), lambda: cold(under_torchrun), turns=6)
    wall, processor = (
        [[turn[which] for turn in turns] for turns in (ours, other)] for which in (0, 1)
    )
    return [
        compared(
            "cold",
            "a script, from its start to both first backwards, s",
            *wall,
            alternative="torchrun",
            at_most=1.0,
        ),
        compared(
            "cold", "processor time until all is closed, s", *processor, alternative="torchrun"
        ),
    ]


def under_script(_, name):
    """Run a function of `ranks` by a script that connects first; returns what each rank left."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(RANKS), "--connect", name, folder]
        subprocess.run(command, env=ENVIRONMENT, cwd=folder, check=True, stderr=subprocess.PIPE)
        return left_in(folder)


def processor_seconds():
    """What all processes of this machine have used of its cores since it was started."""
    times = psutil.cpu_times()
    return times.user + times.system


WITHOUT_CLUSTER = {
    "windows": measure_windows,
    "loader": measure_loader,
    "cold": measure_cold,
}
ON_CLUSTER = {"launch": measure_launch, "step": measure_step, "memory": measure_memory}


def main():
    options = measuring.command_line(__doc__, ON_CLUSTER | WITHOUT_CLUSTER, "launch").parse_args()
    machine = measuring.describe_machine()
    measuring.show_head(machine)
    results = []
    if options.only in (None, *ON_CLUSTER):
        with ddp.connect("local", workers=2) as client:
            results += measuring.take(ON_CLUSTER, options.only, client)
    results += measuring.take(WITHOUT_CLUSTER, options.only)
    measuring.write(options.output, machine, results)


if __name__ == "__main__":
    main()
