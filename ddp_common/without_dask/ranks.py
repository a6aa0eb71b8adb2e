"""The same tutorials where a launcher without Dask has started the ranks: torchrun, or srun in a Slurm step.

There every rank executes the whole program. `connect` joins the process group and gives a `Ranks` instead of a client; `launch` calls
the function in this very process. Rank 0 is the one that a person hears and that keeps the run directory; what the others print goes
nowhere, what they report reaches rank 0 when the function has returned. Relies on a file system that all ranks see. What ranks tell
each other here goes through the run's store, which admits nobody else, as JSON; only rank 0's result may be more than that.
"""

import contextlib
import datetime
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ddp_common.errors import Error, RankFailed, RunStopped
from ddp_common.files import absolute, make_private, save_whole
from ddp_common.messages import (
    CheckpointFailed,
    CheckpointSaved,
    File,
    Position,
    Report,
    shows_training,
)
from ddp_common.ranks import checkpoint, checkpoint_files, rendezvous, reporting, secret, stopping
from ddp_common.run.config import current, describe, may_be_written, run_to_resume
from ddp_common.run.places import new_directory
from ddp_common.run.progress import Progress
from ddp_common.run.result import Run
from ddp_common.run.run_directory import RunDirectory
from ddp_common.without_dask.launchers import started_by

EXCHANGE_TIMEOUT = datetime.timedelta(
    minutes=30
)  # that ranks wait for one whose function takes longer than theirs

_launches = 0  # of this process: each has keys of its own in the store


class Ranks:
    """Stands for all ranks, as a client stands for a cluster: one of these in each. Close it, or use it in a `with` block."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(rendezvous.process_group())
        self.ranks, self.cluster = rendezvous.world_size(), None
        if rendezvous.rank() != 0:
            sys.stdout.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def run_here(self, function, arguments, directory):
        """What `launch` does here: call the function in this very process."""
        return run_here(function, arguments, directory)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.__exit__(*exception)

    def close(self):
        self._stack.close()


def run_here(function, arguments, directory):
    """Call the function in this rank, and do for it what agent and client do elsewhere. Returns what `launch` returns, on every rank."""
    with contextlib.ExitStack() as at_the_end:
        return _run_here(function, arguments, directory, at_the_end)


def _run_here(function, arguments, directory, at_the_end):
    rank, began, records = rendezvous.rank(), time.monotonic(), []
    path = _agree_on_directory(function, directory)
    run_directory, own_path = (RunDirectory(path) if rank == 0 else None), path
    if rank == 0:
        at_the_end.callback(run_directory.close)  # and with it the lock, also after a failure
    progress = Progress() if rank == 0 else None
    os.environ["DDP_CHECKPOINTS"] = str(path / "checkpoints")
    before, lost = (list(run_directory.records) if rank == 0 else []), []
    config = []  # what is to be written into config.json; of a resumed run once it has begun

    def receive(message):
        if config and shows_training(message):
            run_directory.write_json("config.json", config.pop())
        match message:
            case Report():
                records.append({"rank": rank, **message.values})
                if rank == 0:
                    run_directory.record(rank, message.values)
                    progress.record(message.values)
            case CheckpointFailed():  # only rank 0 saves
                run_directory.not_saved(message.why)
            case CheckpointSaved():
                run_directory.saved()
            case Position():
                if rank == 0:
                    progress.position(message.known())
            case File():
                try:
                    save_whole(path, message.name, message.content)
                except (OSError, Error) as error:
                    # Not raised: this is the thread that passes on everything.
                    text = f"The file {message.name} of rank {rank} was not saved: {error}"
                    lost.append(text)
                    print(text, file=sys.stderr, flush=True)

    if rank == 0:
        config.append(describe([], path, getattr(function, "__name__", "run")))
        if may_be_written(config[0], path):
            run_directory.write_json("config.json", config.pop())
        run_directory.log(
            f"{rendezvous.world_size()} ranks of {started_by()}; rank 0 is process {os.getpid()} on {socket.gethostname()}"
        )
    finish_reports, earlier, result, stopped = (
        reporting.start(receive),
        signal.getsignal(signal.SIGTERM),
        None,
        False,
    )
    try:
        stopping.listen_to_sigterm()
        result = function(**arguments)
    except stopping.Stopped:
        stopped = True
        if rank == 0:
            run_directory.say_ending()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if stopped else earlier)
        checkpoint.finish_writing()
        finish_reports()
        reporting.stop()
        if progress is not None:
            progress.close()
    step = reporting.position().get("step", 0)
    if stopped and not step:
        raise _stopped(step, path)
    result, everybodys_records = _exchange(
        result, records
    )  # nobody leaves before rank 0 has saved
    if rank == 0:
        for other, its_records in enumerate(everybodys_records):
            for record in its_records if other else ():
                run_directory.record(
                    other, {key: value for key, value in record.items() if key != "rank"}
                )
        run_directory.log(
            f"{'stopped' if stopped else 'finished'}: {rendezvous.world_size()} rank(s), {time.monotonic() - began:.1f} s"
        )
        run_directory.close()
    else:
        own_path = Path(
            tempfile.mkdtemp(prefix=f"ddp-rank-{rank}-")
        )  # what the program writes there, rank 0 writes into the real one
    if stopped:
        raise _stopped(step, path)
    return Run(
        result,
        own_path,
        rendezvous.world_size(),
        [*before, *(record for each in everybodys_records for record in each)],
        time.monotonic() - began,
        problems=[*lost, *(run_directory.problems if rank == 0 else [])],
    )


def _exchange(result, records):
    """Rank 0's result, and the records of every rank, on every rank."""
    said = _tell_all("records", json.dumps(records).encode())
    if rendezvous.world_size() == 1:
        return _on_cpu(result), [records]
    own = _packed(_on_cpu(result)) if rendezvous.rank() == 0 else b""
    packed = _tell_all("result", own)[0]
    return _on_cpu(result) if rendezvous.rank() == 0 else _unpacked(packed), [
        json.loads(each) for each in said
    ]


def _tell_all(what, content):
    """What every rank says (list of bytes). By the store and not by a collective: the function may have left the process group."""
    store = rendezvous.current_store()
    if store is None:
        return [content]
    prefix = f"launch-{_launches}/{what}"
    store.set(f"{prefix}/{rendezvous.rank()}", content)
    keys = [f"{prefix}/{peer}" for peer in range(rendezvous.world_size())]
    store.wait(keys, EXCHANGE_TIMEOUT)
    return store.multi_get(keys)


def _packed(result):
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _unpacked(content):
    """Rank 0's result. Plain values and tensors need no pickle; anything else is unpickled only if nobody else can have sent it."""
    only_ours = rendezvous.current_store().private
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=not only_ours)


def _stopped(step, path):
    saved = [
        each
        for each in checkpoint_files.checkpoints(path / "checkpoints")
        if checkpoint_files.fault(each) is None
    ]
    newest = f"the newest checkpoint is {saved[-1].name}" if saved else "there is no checkpoint"
    return RunStopped(
        f"The ranks were told to stop (SIGTERM). They left after step {step}; {newest}.",
        step=step,
        directory=path,
    )


def _agree_on_directory(function, directory):
    """Rank 0 chooses and makes the run directory; every rank must see it."""
    global _launches
    _launches += 1
    chosen = None
    if rendezvous.rank() == 0:
        name = getattr(function, "__name__", "run")
        chosen = str(directory or run_to_resume(name) or new_directory(current.name or name))
        if "://" in chosen:
            raise Error(
                f"{chosen}: ranks of {started_by()} need a run directory in a file system that all of them see. Object storage "
                "works where Dask starts the ranks."
            )
        chosen = str(absolute(chosen))
        make_private(Path(chosen))
    path = Path(json.loads(_tell_all("directory", json.dumps(chosen).encode())[0]))
    seen = [
        json.loads(each)
        for each in _tell_all(
            "seen", json.dumps(None if path.is_dir() else socket.gethostname()).encode()
        )
    ]
    if blind := sorted({host for host in seen if host}):
        raise Error(
            f"The run directory {path} is not visible on {', '.join(blind)}. Choose one in a shared file system: RUNS=/path."
        )
    return path


def _on_cpu(value):
    """A result without tensors of a GPU, which other ranks may not have."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value


def start_ranks(launcher, tutorial, workers, restarts):
    """Start `python -m ddp_common run TUTORIAL` on every rank with torchrun or srun, and wait for them; settings are in the environment.

    Raises `RankFailed` with what the launcher knows: the ranks have said the rest themselves.
    """
    started = command(launcher, tutorial, workers, restarts)
    os.environ.setdefault(secret.VARIABLE, secret.new())
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    if launcher == "srun":
        os.environ["DDP_LAUNCHER"] = "srun"
        code = _run_srun(started)
        if code in (143, 15):
            raise SystemExit(143)
        if code:
            raise Error(
                f"srun ended with exit code {code}. What the ranks said stands above; srun names the task that failed first."
            )
        return
    with tempfile.TemporaryDirectory(prefix="ddp-torchrun-") as folder:
        _run_torchrun([*_meet_in(folder), *started[2:]])


def _meet_in(folder):
    """Options of torchrun that mean --standalone, but for a file that only its user reads instead of a port that everybody reaches.

    What torchrun finds there it unpickles; and its store for the ranks would admit everybody too: rank 0 opens one of its own.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return [
        "--nnodes=1",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={folder}/rendezvous",
        f"--rdzv-id={Path(folder).name}",
    ]


def command(launcher, tutorial, workers, restarts):
    """The command line, a list of str, by which torchrun or srun starts the ranks."""
    program = ["-m", "ddp_common", "run", tutorial]
    if launcher == "srun":
        return ["srun", f"--ntasks={workers}", "--kill-on-bad-exit=1", sys.executable, *program]
    return [
        "torchrun",
        "--standalone",
        f"--nproc-per-node={workers}",
        f"--max-restarts={restarts}",
        *program,
    ]


def _run_srun(command):
    """Its exit code. Ctrl-C and SIGTERM become its SIGTERM: it hands that on to the ranks, which save and leave."""
    try:
        process = subprocess.Popen(
            command, start_new_session=True
        )  # a terminal's Ctrl-C would only have it print a question
    except FileNotFoundError:
        raise Error(
            "There is no srun here. CLUSTER=srun needs Slurm's commands: log in to the cluster, or use CLUSTER=torchrun."
        ) from None
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()


def _run_torchrun(arguments):
    import logging

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun.main(arguments)
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code == 143:
            raise SystemExit(143) from None
        name = signal.Signals(-code).name if code < 0 else None
        what = f"killed by {name}" if name else f"exit code {code}; what it said stands above"
        raise RankFailed(
            f"Rank {rank} failed: {what}.",
            rank=rank,
            host=socket.gethostname(),
            exitcode=code,
            signal=name,
        ) from None
