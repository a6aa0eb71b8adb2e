"""The same tutorials where torchrun, or srun in a Slurm step, has started the ranks.

There every rank executes the whole program. `connect` joins the process group and gives a `Ranks`
instead of a client; `launch` calls the function in this very process. Rank 0 is the one that a
person hears and that keeps the run directory; what the others print goes nowhere, what they report
reaches rank 0 when the function has returned. Relies on a file system that all ranks see: records
and the result go from rank to rank through the run directory, which only their user can read. What
goes through the ranks' store is JSON, since others may reach it.
"""

import atexit
import contextlib
import datetime
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_common.errors import Error, RunStopped
from ddp_common.files import absolute, make_private, save_whole
from ddp_common.messages import (
    RECORDINGS,
    CheckpointFailed,
    CheckpointSaved,
    File,
    Message,
    Position,
    Report,
    shows_training,
)
from ddp_common.ranks import (
    checkpoint,
    checkpoint_files,
    recorder,
    rendezvous,
    reporting,
    stopping,
    trace,
)
from ddp_common.run.config import current, describe, may_be_written, run_to_resume
from ddp_common.run.places import new_directory
from ddp_common.run.progress import Progress
from ddp_common.run.result import Run
from ddp_common.run.run_directory import RunDirectory
from ddp_common.without_dask.launchers import started_by

# Between two looks whether a rank has ended that others wait for.
LOOK_INTERVAL = datetime.timedelta(seconds=10)

_launches = 0  # of this process: each has keys of its own in the store


class Ranks:
    """Stands for all ranks, as a client stands for a cluster: one of these in each.

    Close it, or use it in a `with` block.
    """

    def __init__(self):
        recorder.keep_the_latest()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(rendezvous.process_group())
        self.ranks = rendezvous.world_size()
        self.cluster = None
        if rendezvous.rank() != 0:
            _silence_stdout()

    def run_here(
        self,
        function: Callable,
        arguments: dict,
        directory: str | Path | None,
        on_report: Callable[[dict], Any] | None = None,
        stall_timeout: float | None = None,
    ) -> Run:
        """What `launch` does here: call the function in this very process."""
        return run_here(function, arguments, directory, on_report, stall_timeout)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.__exit__(*exception)

    def close(self) -> None:
        self._stack.close()


def _silence_stdout():
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def run_here(
    function: Callable,
    arguments: dict,
    directory: str | Path | None,
    on_report: Callable[[dict], Any] | None = None,
    stall_timeout: float | None = None,
) -> Run:
    """Call the function in this rank, and do for it what agent and client do elsewhere.

    Returns what `launch` returns, on every rank. `on_report` is called on rank 0 at the end, with
    the records of all ranks: until then those of the others are not there. A rank that waits in a
    collective for more than `stall_timeout` seconds (None: for ever) raises torch's RuntimeError.
    Raises `RunStopped` after SIGTERM, `Error` if the run directory cannot be used, and whatever
    the function raises.
    """
    with contextlib.ExitStack() as at_the_end:
        return _run_here(function, arguments, directory, on_report, stall_timeout, at_the_end)


def _run_here(function, arguments, directory, on_report, stall_timeout, at_the_end):
    rank = rendezvous.rank()
    began = time.monotonic()
    path = _agree_on_directory(function, directory)
    run_directory = progress = None
    earlier_records = []
    if rank == 0:
        run_directory = RunDirectory(path)
        at_the_end.callback(run_directory.close)  # and with it the lock, also after a failure
        progress = Progress()
        earlier_records = list(run_directory.records)
    os.environ["DDP_CHECKPOINTS"] = str(path / "checkpoints")
    records = []  # of this rank
    lost = []  # which files were not saved, and why
    config = []  # what is to be written into config.json; of a resumed run once it has begun

    def receive(message: Message) -> None:
        if config and shows_training(message):
            run_directory.write_json("config.json", config.pop())
        match message:
            case Report():
                records.append({"rank": rank, **message.values})
                if rank == 0:
                    # An `Error` if another run has taken the folder: this thread must go on.
                    with contextlib.suppress(Error):
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
            f"{rendezvous.world_size()} ranks of {started_by()}; "
            f"rank 0 is process {os.getpid()} on {socket.gethostname()}"
        )
    if dist.is_initialized():
        limit = datetime.timedelta(seconds=stall_timeout) if stall_timeout else rendezvous.FOREVER
        _set_pg_timeout(limit)
    finish_reports = reporting.start(receive)
    at_the_end.callback(register_optimizer_step_post_hook(reporting.made_progress).remove)
    earlier_handler = signal.getsignal(signal.SIGTERM)
    result = None
    was_stopped = False
    try:
        stopping.listen_to_sigterm()
        trace.trace_if_asked()
        with stopping.in_agreement():
            result = function(**arguments)
        trace.finish()
    except stopping.Stopped:
        was_stopped = True
        if rank == 0:
            run_directory.say_ending()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if was_stopped else earlier_handler)
        trace.end()
        checkpoint.finish_writing()
        finish_reports()
        reporting.stop()
        if progress is not None:
            progress.close()
    step = reporting.position().get("step", 0)
    if was_stopped and not step:
        raise _stopped(step, path)

    # Nobody leaves before rank 0 has saved.
    result, everybodys_records = _exchange(path, result, records)
    if rank == 0:
        _write_records_of_others(run_directory, everybodys_records)
        run_directory.log(
            f"{'stopped' if was_stopped else 'finished'}: "
            f"{rendezvous.world_size()} rank(s), {time.monotonic() - began:.1f} s"
        )
        if on_report is not None:
            for record in itertools.chain.from_iterable(everybodys_records):
                on_report(record)
        run_directory.close()
        own_path = path
        problems = [*lost, *run_directory.problems]
    else:
        # What the program writes there, rank 0 writes into the real one.
        own_path = Path(tempfile.mkdtemp(prefix=f"ddp-rank-{rank}-"))
        atexit.register(shutil.rmtree, own_path, ignore_errors=True)
        problems = lost
    if was_stopped:
        raise _stopped(step, path)
    if own_path != path:
        _link_recordings(path / RECORDINGS, own_path / RECORDINGS)
    return Run(
        result,
        own_path,
        rendezvous.world_size(),
        [*earlier_records, *itertools.chain.from_iterable(everybodys_records)],
        time.monotonic() - began,
        problems=problems,
    )


def _link_recordings(theirs, own):
    """So that `Run.timeline` works on every rank."""
    own.mkdir()
    for recording in theirs.glob("rank-*.json.gz"):
        (own / recording.name).symlink_to(recording)


def _write_records_of_others(run_directory, everybodys_records):
    """Those of rank 0 have been written while it trained."""
    for rank, records in enumerate(everybodys_records):
        if rank == 0:
            continue
        for record in records:
            without_rank = {key: value for key, value in record.items() if key != "rank"}
            run_directory.record(rank, without_rank)


def _exchange(path, result, records):
    """Rank 0's result, and the records of every rank, on every rank."""
    ranks = rendezvous.world_size()
    if ranks == 1:
        return _on_cpu(result), [records]
    folder = path / f"exchange-{_launches}"
    folder.mkdir(mode=0o700, exist_ok=True)
    mine = folder / f"records-{rendezvous.rank()}.json"
    mine.write_text(json.dumps(records), encoding="utf-8")
    if rendezvous.rank() == 0:
        result = _on_cpu(result)
        torch.save(result, folder / "result.pt")
    _tell_all("written", b"")
    files = [folder / f"records-{rank}.json" for rank in range(ranks)]
    everybodys_records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if rendezvous.rank() != 0:
        # What rank 0 has returned, of whatever class: nobody else can have written the file.
        result = torch.load(folder / "result.pt", map_location="cpu", weights_only=False)
    _tell_all("read", b"")
    if rendezvous.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return result, everybodys_records


def _tell_all(what, content):
    """What every rank says (list of bytes). Waits for a rank however long its function takes.

    By the store and not by a collective: the function may have left the process group.

    Raises `Error` if a rank has ended and said nothing.
    """
    store = rendezvous.current_store()
    if store is None:
        return [content]
    prefix = f"launch-{_launches}/{what}"
    everybody = range(rendezvous.world_size())
    keys = [f"{prefix}/{peer}" for peer in everybody]
    with rendezvous.explain_lost_store(rendezvous.rank()):
        store.set(keys[rendezvous.rank()], content)
        while True:
            gone = [peer for peer in everybody if rendezvous.has_left(peer)]
            with contextlib.suppress(dist.DistStoreError):  # time is up: look again
                store.wait(keys, LOOK_INTERVAL)
                return store.multi_get(keys)
            silent = [str(peer) for peer in gone if not store.check([keys[peer]])]
            if silent:
                raise Error(
                    f"Rank {', '.join(silent)} ended before it had told the other ranks what it "
                    "has reported. Its own output says why."
                )


def _stopped(step, path):
    last = checkpoint_files.newest_good(path / "checkpoints")
    newest = "there is no checkpoint"
    if last is not None:
        newest = f"the newest checkpoint is that of step {checkpoint_files.step_of(last)}"
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
        chosen = _choose_directory(getattr(function, "__name__", "run"), directory)
    said = _tell_all("directory", json.dumps(chosen).encode())
    path = Path(json.loads(said[0]))

    blind = None if path.is_dir() else socket.gethostname()
    said = _tell_all("seen", json.dumps(blind).encode())
    hosts = [json.loads(each) for each in said]
    blind_hosts = sorted({host for host in hosts if host is not None})
    if blind_hosts:
        raise Error(
            f"The run directory {path} is not visible on {', '.join(blind_hosts)}. "
            "Choose one in a shared file system: RUNS=/path."
        )
    return path


def _choose_directory(name, directory):
    chosen = str(directory or run_to_resume(name) or new_directory(current.name or name))
    if "://" in chosen:
        raise Error(
            f"{chosen}: ranks of {started_by()} need a run directory in a file system that all "
            "of them see. Object storage works where Dask starts the ranks."
        )
    chosen = str(absolute(chosen))
    make_private(Path(chosen))
    return chosen


def _on_cpu(value):
    """A result without tensors of a GPU, which other ranks may not have."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(each) for each in value)
    return value
