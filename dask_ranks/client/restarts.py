"""A launch on Dask's workers: one attempt, and after a failure others while restarts are left.

Each attempt goes on from the newest checkpoint. Commands go client -> agent -> rank, and messages
come back the same way. Relies on the workers being processes that can import `ddp_common`.
Promises: when `launch` returns or raises, every rank that it started is gone and the workers are
free. If a worker or the scheduler does not answer, that takes some seconds more: the agents notice
that nobody wants their ranks, and end them.
"""

import atexit
import shutil
import tempfile
import time
import uuid
from typing import Any

from distributed import CancelledError, Client

from dask_ranks.client import signals
from dask_ranks.client.attempt import Attempt, Unreachable, open_inbox, start
from dask_ranks.client.claims import KeepsWorkers, claimed_workers, refuse_unusable
from dask_ranks.client.monitor import end, follow
from dask_ranks.client.payload import pickled
from dask_ranks.client.tables import Tables
from dask_ranks.run.folders import new_directory
from dask_ranks.run.job import Job, RankFailed, Run, RunStopped
from dask_ranks.run.progress import explain_interrupt, how_to_go_on, say_folder
from dask_ranks.run.recorder import describe
from dask_ranks.run.run_directory import RunDirectory
from ddp_common.errors import Error, first_line


def on_workers(client: Client, job: Job) -> Run:
    """What `launch` does with a client of Dask.

    Raises `Error` also for what is no client, or one through which no ranks can be started.
    """
    refuse_unusable(client)
    began = time.monotonic()
    payload = pickled(job.function, job.arguments)
    own_tables = Tables(client, job.tables)
    run_directory: RunDirectory | None = None
    run: Run | None = None
    failures: list[Exception] = []
    try:
        while run is None:
            attempt_id = uuid.uuid4().hex[:12]
            if isinstance(client, KeepsWorkers):
                client.make_ready(bool(failures))
            own_tables.ready(job.timeout)
            rows_held = own_tables.rows_held()
            inbox = open_inbox(client, attempt_id)
            claimed = claimed_workers(client, attempt_id, job.workers, job.timeout, rows_held)
            with claimed as addresses:
                run_directory = run_directory or _open_directory(job, len(addresses))
                number = len(failures) + 1
                attempt = Attempt(client, attempt_id, addresses, inbox, run_directory, job, number)
                try:
                    result = _run(attempt, payload, own_tables, failures)
                except (RankFailed, RunStopped, Unreachable) as failure:
                    attempt.recorder.call_on_report()
                    if number > job.restarts or signals.stop_requested:
                        raise
                    failures.append(failure)
                    continue
                attempt.recorder.call_on_report()
            run_directory.close()  # now: it may have to say that something was not written
            run = Run(
                result=result,
                directory=None if run_directory.is_temporary else run_directory.path,
                world_size=len(addresses),
                records=run_directory.records,
                seconds=time.monotonic() - began,
                failures=failures,
                problems=run_directory.problems,
            )
        return run
    except KeyboardInterrupt as interrupt:
        if run_directory is not None:
            run_directory.log("interrupted from the keyboard")
            interrupt.directory = run_directory.path  # type: ignore[attr-defined]  # read as such
            explain_interrupt(interrupt, job.function, run_directory.path, run_directory.records)
        raise
    except (RankFailed, RunStopped) as error:
        if job.directory is not False:
            error.add_note(how_to_go_on(error.directory, job.function))
        raise
    except Error as error:
        if failures:
            assert run_directory is not None, "an attempt has failed in it"
            reason = first_line(failures[-1])
            error.args = (f"{error}\nIt was to restart because: {reason}",)
            error.directory = run_directory.path
        raise
    finally:
        own_tables.close()
        if run_directory is not None:
            run_directory.close()
            if run_directory.is_temporary and run is not None:  # else when this program ends
                shutil.rmtree(run_directory.path, ignore_errors=True)


def _open_directory(job: Job, ranks: int) -> RunDirectory:
    if job.directory is False:
        folder = tempfile.mkdtemp(prefix="ddp-run-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return RunDirectory(folder, is_temporary=True)
    opened = RunDirectory(job.directory or new_directory(job.folder_name))
    say_folder(opened.path, ranks)
    return opened


def _run(attempt: Attempt, payload: bytes, own_tables: Tables, failures: list[Exception]) -> Any:
    """Start the ranks, follow them, and have them gone; returns rank 0's result."""
    job = attempt.job
    signals.attempts_running += 1
    try:
        path, addresses = attempt.directory.path, attempt.addresses
        config = describe(path, job.run_config, addresses, job.function_name)
        attempt.recorder.describe(config)
        if failures:
            _note_restart(attempt, failures[-1])
        try:
            start(attempt, payload, own_tables)
        except (OSError, CancelledError) as error:
            raise attempt.cause_of(error) from None
        return follow(attempt)
    finally:
        try:
            end(attempt)
        finally:
            signals.attempts_running -= 1


def _note_restart(attempt: Attempt, previous: Exception) -> None:
    """Put down that this attempt is a restart, and what has ended the one before."""
    attempt.directory.restart += 1
    reason = first_line(previous)
    step = attempt.checkpoints.last_step()
    ranks = len(attempt.addresses)
    event = dict(event="restart", attempt=attempt.number, reason=reason, step=step, ranks=ranks)
    attempt.directory.record(getattr(previous, "rank", 0), {"time": time.time(), **event})
    where = f" from step {step}" if step else ""
    text = f"Restart {attempt.number - 1} on {ranks} rank(s){where}. Why: {reason}"
    attempt.directory.log(text)
    attempt.recorder.progress.note(text, also_in_logs=True)
