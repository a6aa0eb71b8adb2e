"""The same tutorials where torchrun, srun or another launcher has started the ranks.

There every rank executes the whole program. `connect` joins the process group and gives a `Ranks`
instead of a client; `launch` calls the function in this very process, with the steps of
`rank.life`. Rank 0 is the one that a person hears and that keeps the run directory. What the
others print goes nowhere; what they report goes into `metrics-<rank>.jsonl` there, which rank 0
takes in when the function has returned. Relies on a file system that all ranks see, and on a run
directory to which only their user can write: rank 0's result goes through it. What goes through
the ranks' store is JSON, since others may reach it.
"""

import contextlib
import datetime
import functools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from dask_ranks.rank import life, whereabouts
from dask_ranks.rank.last_word import GROUP_TWICE, HINTS, pickled_result
from dask_ranks.run.folders import new_directory
from dask_ranks.run.job import Job, Run, RunStopped
from dask_ranks.run.progress import how_to_go_on, say_folder
from dask_ranks.run.recorder import Recorder, describe
from dask_ranks.run.run_directory import METRICS, RunDirectory, RunFiles, metrics_of, read_records
from dask_ranks.without_dask import launchers
from ddp_common import rendezvous, replicas, stopping
from ddp_common.errors import Error
from ddp_common.files import RESULT, open_file
from ddp_common.reporting import Problem

# Between two looks whether a rank has ended that others wait for.
STORE_INTERVAL = datetime.timedelta(seconds=10)

_launches = 0  # of this process: each has keys of its own in the store


class Ranks(contextlib.ExitStack):
    """Stands for all ranks, as a client stands for a cluster: one of these in each.

    Close it, or use it in a `with` block: the ranks then leave the process group.
    """

    def __init__(self) -> None:
        super().__init__()
        if dist.is_initialized():
            raise Error(
                "The process group is there already, and connect() makes it.\n"
                "Remove init_process_group(…); docs/coming-from-elsewhere.md has a table."
            )
        if launchers.in_slurm_step() and "RANK" not in os.environ:
            launchers.set_variables_of_slurm()
        whereabouts.keep_collectives()
        self.enter_context(rendezvous.process_group())
        self.ranks = rendezvous.world_size()
        self.cluster = None
        if rendezvous.rank() != 0:
            sys.stdout.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def launch(self, job: Job) -> Run:
        """What `launch` does here: call the function in this very process.

        Returns what `launch` returns, on every rank. `on_report` is called on rank 0 at the end,
        with the records of all ranks: until then those of the others are not there. A rank that
        waits in a collective for more than `stall_timeout` seconds (None: for ever) raises torch's
        RuntimeError. Raises `RunStopped` after SIGTERM, `Error` if the run directory cannot be
        used or a rank has left before the others, and whatever the function raises.
        """
        global _launches
        _launches += 1
        if job.tables:
            raise Error(
                f"The argument {job.tables[0].name} is a Dask collection, and no Dask worker has "
                "started these ranks.\n"
                "Start with Dask, or write it once, with to_parquet, and let each rank read its "
                "files."
            )
        began = time.monotonic()
        if dist.is_initialized():
            seconds = job.stall_timeout or rendezvous.FOREVER.total_seconds()
            _set_pg_timeout(datetime.timedelta(seconds=seconds))
        with contextlib.ExitStack() as at_the_end:
            files = _agree_on_directory(job, at_the_end)
            is_first = isinstance(files, RunDirectory)
            recorder = Recorder(files, job.on_report if is_first else None, draws=is_first)
            if is_first:
                recorder.progress.whose = "rank 0: " if self.ranks > 1 else ""
                recorder.describe(describe(files.path, job.run_config, [], job.function_name))
            result, models, stopped = _train(job, recorder)
            if stopped is None or stopped.step > 0:  # else ranks have left each on its own
                result, problems = _exchange(result, models, recorder, began)
                recorder.call_on_report()
        if stopped is not None:
            raise RunStopped(
                f"The ranks were told to stop (SIGTERM). They left after step {stopped.step}. "
                f"{how_to_go_on(files.path, job.function)}",
                step=stopped.step,
                directory=files.path,
            )
        seconds = time.monotonic() - began
        return Run(result, files.path, self.ranks, files.records, seconds, problems=problems)


def _agree_on_directory(job: Job, at_the_end: contextlib.ExitStack) -> RunFiles:
    """Rank 0 chooses and makes the run directory. Returns what this rank has of it.

    Raises `Error` unless all ranks see it.
    """
    own: RunFiles | None = None
    if rendezvous.rank() == 0:
        own = RunDirectory(job.directory or new_directory(job.folder_name))
        at_the_end.callback(own.close)  # and with it the lock, also after a failure
        say_folder(own.path, rendezvous.world_size())
        own.log(
            f"{rendezvous.world_size()} ranks of {launchers.started_by()}; "
            f"rank 0 is process {os.getpid()} on {socket.gethostname()}"
        )
    (chosen, restart), *_ = _tell_all("directory", [str(own.path), own.restart] if own else None)
    path = Path(chosen)
    hosts = _tell_all("blind hosts", None if path.is_dir() else socket.gethostname())
    blind = sorted({host for host in hosts if host is not None})
    if blind:
        raise Error(
            f"The run directory {path} is not visible on {', '.join(blind)}. "
            "Choose one in a shared file system: RUNS=/path."
        )
    if own is None:
        own = RunFiles(path, metrics_of(rendezvous.rank()))
        own.restart = restart
        at_the_end.callback(own.close)
    return own


def _train(
    job: Job, recorder: Recorder
) -> tuple[Any, replicas.Fingerprint | None, stopping.Stopped | None]:
    """Returns the function's result, this rank's models in the end, and what has stopped it.

    Without models where something has.
    """
    os.environ["DDP_CHECKPOINTS"] = str(recorder.files.path / "checkpoints")
    later_handler = signal.getsignal(signal.SIGTERM)
    receive = functools.partial(recorder.take, rendezvous.rank())
    try:
        with contextlib.closing(recorder), life.reports(receive), life.sigterm():
            return *life.train(job.function, job.arguments), None
    except stopping.Stopped as stopped:
        later_handler = signal.SIG_IGN
        return None, None, stopped
    except ValueError as error:
        if GROUP_TWICE in str(error):  # the first error of everybody who brings a script here
            error.add_note(HINTS[GROUP_TWICE])
        raise
    finally:
        signal.signal(signal.SIGTERM, later_handler)


def _exchange(
    result: Any, models: replicas.Fingerprint | None, recorder: Recorder, began: float
) -> tuple[Any, list[str]]:
    """All that was reported goes to rank 0, and its result to all ranks.

    Returns that, and what could not be written or has gone wrong on any rank. `models` is None if
    this rank was told to stop.
    """
    files = recorder.files
    result_file = files.path / RESULT
    is_first = isinstance(files, RunDirectory)
    if not is_first:
        files.close()
    last_words = _tell_all("last words", [[] if is_first else files.problems, models])
    problems: list[str] = []
    if is_first:
        _finish(recorder, [models for _, models in last_words], time.monotonic() - began)
        everybodys = [problem for theirs, _ in last_words for problem in theirs] + files.problems
        problems = list(dict.fromkeys(everybodys))
        with open(result_file, "wb", opener=open_file) as file:
            file.write(pickled_result(result))
    problems, *_ = _tell_all("written", problems)
    if not is_first:
        files.records = list(read_records(files.path / METRICS))
    result = torch.load(result_file, map_location="cpu", weights_only=False)
    _tell_all("read")
    if is_first:
        result_file.unlink()
    return result, problems


def _finish(recorder: Recorder, models: list[replicas.Fingerprint | None], seconds: float) -> None:
    """On rank 0: take in what the others have reported; finish writing."""
    files = recorder.files
    assert isinstance(files, RunDirectory), "rank 0 has one"
    for peer in range(1, rendezvous.world_size()):
        files.take_in(peer)
    of_ranks = [each for each in models if each is not None]
    is_finished = len(of_ranks) == len(models)
    if is_finished:
        for oddity in life.oddities(of_ranks):
            recorder.take(0, Problem(oddity))
    how = "finished" if is_finished else "stopped"
    files.log(f"{how}: {rendezvous.world_size()} rank(s), {seconds:.1f} s")
    files.close()


def _tell_all(what: str, value: Any = None) -> list[Any]:
    """What each rank says, in their order. Waits for a rank however long its function takes.

    By the store and not by a collective: the function may have left the process group.

    Raises `Error` if a rank has ended and said nothing.
    """
    store = rendezvous.current_store()
    if store is None:
        raise Error(
            "These ranks have left their process group. `launch` belongs inside of the "
            "`with ddp.connect()` block, before `close`."
        )
    everybody = range(rendezvous.world_size())
    keys = [f"launch-{_launches}/{what}/{peer}" for peer in everybody]
    with rendezvous.explain_lost_store(rendezvous.rank()):
        store.set(keys[rendezvous.rank()], json.dumps(value))
        while True:
            gone = [peer for peer in everybody if rendezvous.has_left(peer)]
            with contextlib.suppress(dist.DistStoreError):  # time is up: look again
                store.wait(keys, STORE_INTERVAL)
                return [json.loads(said) for said in store.multi_get(keys)]
            silent = [str(peer) for peer in gone if not store.check([keys[peer]])]
            if silent:
                raise Error(
                    f"Rank {', '.join(silent)} ended before it had told the other ranks what it "
                    "has reported. Its own output says why."
                )
