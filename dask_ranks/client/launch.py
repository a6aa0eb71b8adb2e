"""`launch`: start one rank on each of some workers; after a failure, start again.

One turn of its loop is one attempt; each goes on from the newest checkpoint. Commands go client ->
agent -> rank, and messages come back the same way. Relies on the workers being processes that can
import `ddp_common`. Promises: when `launch` returns or raises, every rank that it started is gone
and the workers are free. If a worker or the scheduler does not answer, that takes some seconds
more: the agents notice that nobody wants their ranks, and end them.
"""

import atexit
import inspect
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from distributed import CancelledError, Client

from dask_ranks.client import signals, tables
from dask_ranks.client.attempt import Attempt
from dask_ranks.client.claims import KeepsWorkers, claimed_workers, refuse_unusable
from dask_ranks.client.inbox import open_inbox
from dask_ranks.client.monitor import end, follow
from dask_ranks.client.payload import pickled, refuse_wrong_arguments
from dask_ranks.client.submission import note_restart, start
from dask_ranks.client.tables import Tables
from dask_ranks.rank.scripts import Script
from dask_ranks.run.folders import check_folder, new_directory
from dask_ranks.run.job import Job, Launcher, Run
from dask_ranks.run.progress import explain_interrupt, say_folder
from dask_ranks.run.recorder import check_config, describe
from dask_ranks.run.run_directory import RunDirectory
from dask_ranks.values import whole_number
from ddp_common.errors import Error, RankFailed, RunStopped, first_line
from ddp_common.files import absolute

PLACEMENT_TIMEOUT = 60  # seconds to wait for free workers
STALL_TIMEOUT = 600  # seconds that a rank may live without making progress


def launch(
    client: Any,
    function: Callable,
    /,
    *,
    workers: int | None = None,
    restarts: int | None = None,
    stall_timeout: float | None = STALL_TIMEOUT,
    directory: str | Path | Literal[False] | None = None,
    timeout: float = PLACEMENT_TIMEOUT,
    on_report: Callable[[dict], Any] | None = None,
    run_name: str | None = None,
    run_config: dict | None = None,
    **arguments: Any,
) -> Run:
    """Run `function(**arguments)` on one rank for each worker and return a `Run`.

    In place of a function, `ddp.script("train.py", "--lr", "0.1")` runs a script as torchrun does.

    `client` is a `distributed.Client`, or what `connect` gives under torchrun and srun: there the
    ranks are running already, and only `directory`, `stall_timeout`, `on_report` and `arguments`
    matter. `workers` is the number of ranks (default: as many as the cluster has workers);
    launches that find too few free ones, or some that do not answer, wait up to `timeout` seconds.

    A Dask DataFrame, Series, Array or Bag, or a list of futures, among `arguments` arrives in each
    rank as the partitions that lie on its worker (`Rows`). Those whose partitions have the same
    lengths belong together: a rank gets the same partitions of each.

    After a failure it starts again from the newest good checkpoint, up to `restarts` times
    (default: RESTARTS from the environment, else 0), on as many workers as there are then. With
    `workers`, it is exactly that many: where fewer are left it waits for others to come, up to
    `timeout` seconds, and raises `Error` then, which also says why it was to restart.

    A rank that makes no progress for `stall_timeout` seconds is a failure (None: never), and so
    is one that does not start within 600 s; progress is a step of a sampler or an optimizer, a
    batch of an evaluation, a collective that ends, a report, a saved file or checkpoint.
    `directory` continues in an earlier run's directory, whose newest checkpoint
    `Checkpoint.restore` then finds; default: a new one in `runs/<run_name>`; `run_name` is by
    default that of your script, or, in a notebook, that of the function. With `False` no folder
    is kept: a temporary one is removed when `launch` returns, or, after a failure, when the
    program ends. (Under torchrun and srun it is a new one, since ranks on other hosts must find
    it.)
    `run_config` is what the run's config.json says besides versions and workers, such as the
    settings of the program.

    `on_report` is called here, in this thread, with every record that `Run.metrics` will have, as
    a dict with `rank`, `time` (s since 1970), the position in training and what was reported;
    what it raises ends the ranks and is raised. Training does not wait for it; a failure, or
    Ctrl-C, is noticed when it returns. Under torchrun and srun it is called on rank 0, with all
    records, when the function has returned.

    Raises `RankFailed` as soon as any rank fails, `RunStopped` when ranks left because they or
    this program got SIGTERM (both only when restarts are used up), `SchedulerLost`, and `Error`
    for mistakes, which are found before anything starts, and where somebody else has ended the
    ranks.
    """
    refuse_wrong_arguments(function, arguments, OPTIONS)
    arguments, collections = tables.find(arguments)
    if directory:
        directory = absolute(directory)  # now: the program may change its working directory
    if directory is not False:
        check_folder(directory)  # before tables are computed
    job = Job(
        function=function,
        arguments=arguments,
        tables=collections,
        workers=workers,
        restarts=restarts,
        stall_timeout=stall_timeout,
        directory=directory,
        timeout=timeout,
        on_report=on_report,
        run_name=run_name,
        run_config={} if run_config is None else run_config,
    )
    check_config(job.run_config)
    launcher = client if isinstance(client, Launcher) else OnWorkers(client)
    on_workers = isinstance(launcher, OnWorkers)  # else this process is a rank
    with signals.heard(sigterm_too=on_workers):
        return launcher.launch(job)


# What `launch` takes for itself; all other names are arguments of the function.
OPTIONS = inspect.getfullargspec(launch).kwonlyargs


class OnWorkers(Launcher):
    """Ranks on the workers of a Dask cluster: one attempt, and others while restarts are left."""

    def __init__(self, client: Client):
        """Raises `Error` for what is no client, or one through which no ranks can be started."""
        refuse_unusable(client)
        self.client = client

    def launch(self, job: Job) -> Run:
        payload = pickled(job.function, job.arguments)
        wanted = job.restarts if job.restarts is not None else os.environ.get("RESTARTS") or 0
        restarts = whole_number("restarts", wanted, least=0)
        began = time.monotonic()
        run_directory: RunDirectory | None = None
        run: Run | None = None
        failures: list[Exception] = []
        own_tables = Tables(self.client, job.tables)
        try:
            while True:
                attempt_id = uuid.uuid4().hex[:12]
                if isinstance(self.client, KeepsWorkers):
                    self.client.make_ready(bool(failures))
                own_tables.ready(job.timeout)
                rows_held = own_tables.rows_held()
                with (
                    open_inbox(self.client, attempt_id) as inbox,
                    claimed_workers(
                        self.client, attempt_id, job.workers, job.timeout, rows_held
                    ) as addresses,
                ):
                    if run_directory is None:
                        run_directory = _open_directory(job)
                    attempt = Attempt(
                        self.client, attempt_id, addresses, inbox, run_directory, job.on_report
                    )
                    is_script = isinstance(job.function, Script)
                    attempt.state.is_script = attempt.recorder.shows_all = is_script
                    try:
                        result = _run(attempt, job, payload, own_tables, failures, restarts)
                    except (RankFailed, RunStopped) as failure:
                        attempt.recorder.call_on_report()
                        if len(failures) == restarts or signals.stop_requested:
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
                path = run_directory.path
                interrupt.directory = path  # type: ignore[attr-defined]  # read as such
                explain_interrupt(interrupt, job.function, path, run_directory.records)
            raise
        except Error as error:
            if failures and not isinstance(error, (RankFailed, RunStopped)):
                assert run_directory is not None, "an attempt has failed in it"
                reason = first_line(failures[-1])
                error.args = (f"{error}\nIt was to restart because: {reason}",)
                error.directory = run_directory.path
            raise
        finally:
            own_tables.close()
            if run_directory is not None:
                run_directory.close()
                if run_directory.is_temporary:
                    _remove(run_directory.path, now=run is not None)


def _run(
    attempt: Attempt,
    job: Job,
    payload: bytes,
    own_tables: Tables,
    failures: list[Exception],
    restarts: int,
) -> Any:
    """Start the ranks, follow them, and have them gone; returns rank 0's result."""
    signals.attempts_running += 1
    try:
        folder = attempt.directory.path
        function = attempt.directory.function
        attempt.recorder.describe(describe(folder, job.run_config, attempt.addresses, function))
        if failures:
            note_restart(attempt, failures[-1], number=len(failures) + 1)
        try:
            attempt.restarts_before, attempt.restarts_at_most = len(failures), restarts
            start(attempt, payload, own_tables, job.timeout)
        except (OSError, CancelledError) as error:
            raise attempt.cause_of(error) from None
        return follow(attempt, job.timeout, job.stall_timeout)
    finally:
        try:
            end(attempt)
        finally:
            signals.attempts_running -= 1


def _remove(folder: Path, now: bool) -> None:
    """Remove a temporary run directory, now or when the program ends."""
    if now:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _open_directory(job: Job) -> RunDirectory:
    folder: str | Path
    if job.directory is False:
        folder = tempfile.mkdtemp(prefix="ddp-run-")
    else:
        folder = job.directory or new_directory(job.folder_name)
    opened = RunDirectory(folder)
    opened.function = job.function_name
    opened.is_temporary = job.directory is False
    if not opened.is_temporary:
        say_folder(opened.path)
    return opened
