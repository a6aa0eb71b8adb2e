"""Start the ranks of a tutorial with torchrun or srun, and wait for them.

Promises: Ctrl-C and SIGTERM reach the ranks as SIGTERM, on which they save and leave; how the
launcher ended is said in one message.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from dask_ranks.run.job import RankFailed
from ddp_common.errors import Error


def command(launcher: str, tutorial: str, workers: int, restarts: int) -> list[str]:
    """The command line by which torchrun or srun starts the ranks."""
    program = ["-m", "tutorials", "run", tutorial]
    if launcher == "srun":
        # In a shell that srun has started, this step would wait for that one's cores
        shared = ["--overlap"] if "SLURM_STEP_ID" in os.environ else []
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")  # which srun does not take over
        cores = [f"--cpus-per-task={cpus}"] if cpus and not shared else []
        options = [*shared, *cores, f"--ntasks={workers}", "--kill-on-bad-exit=1"]
        return ["srun", *options, sys.executable, *program]
    options = ["--standalone", f"--nproc-per-node={workers}", f"--max-restarts={restarts}"]
    return ["torchrun", *options, *program]


def start_ranks(launcher: str, tutorial: str, workers: int, restarts: int) -> None:
    """Start `python -m tutorials run TUTORIAL` on every rank with torchrun or srun, and wait.

    Settings are in the environment. Raises `RankFailed` or `Error` with what the launcher knows:
    the ranks have said the rest themselves. Raises `SystemExit` after SIGTERM and Ctrl-C.
    """
    words = command(launcher, tutorial, workers, restarts)
    os.environ.setdefault("PYTHONHASHSEED", "0")  # all ranks number a set() alike, as Dask's do
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // workers)))
    os.environ["DDP_LAUNCHER"] = launcher
    if launcher == "srun":
        _run_srun(words)
        return
    with tempfile.TemporaryDirectory(prefix="ddp-torchrun-") as folder:
        after_standalone = words[2:]
        # it keeps some files of the ranks there; without the option it would leave them in /tmp
        _run_torchrun([*meet_in(folder), f"--log-dir={folder}", *after_standalone])


def available_cores() -> int:
    """The cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def meet_in(folder: str | Path) -> list[str]:
    """Options of torchrun in place of --standalone.

    Its processes meet in a file that only their user can read, instead of at a port that everybody
    reaches: torchrun unpickles what it finds there. They need no name of this host, which may not
    resolve.
    """
    return [
        "--nnodes=1",
        "--local-addr=127.0.0.1",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={folder}/rendezvous",
        f"--rdzv-id={Path(folder).name}",
    ]


def _run_srun(words):
    try:
        # In a session of its own: a terminal's Ctrl-C would only have it print a question.
        process = subprocess.Popen(words, start_new_session=True)
    except FileNotFoundError:
        raise Error(
            "There is no srun here. CLUSTER=srun needs Slurm's commands: "
            "log in to the cluster, or use CLUSTER=torchrun."
        ) from None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: process.terminate())
    code = process.wait()
    if code in (128 + signal.SIGTERM, signal.SIGTERM):
        raise SystemExit(128 + signal.SIGTERM)
    if code:
        raise Error(
            f"srun ended with exit code {code}. What the ranks said stands above; "
            "srun names the task that failed first."
        )


def _run_torchrun(arguments):
    from torch.distributed import run as torchrun  # not above: only who starts ranks needs it
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    def stop(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second SIGTERM would leave ranks behind
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until it begins
    signal.signal(signal.SIGINT, stop)
    try:
        torchrun.main(["--signals-to-handle=SIGTERM,SIGHUP,SIGQUIT", *arguments])
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code == 128 + signal.SIGTERM:
            raise SystemExit(code) from None
        if code < 0:
            name = signal.Signals(-code).name
            what = f"killed by {name}"
        else:
            name = None
            what = f"exit code {code}; what it said stands above"
        raise RankFailed(
            f"Rank {rank} failed: {what}.",
            rank=rank,
            host=socket.gethostname(),
            exitcode=code,
            signal=name,
        ) from None
