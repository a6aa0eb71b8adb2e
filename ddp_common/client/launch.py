"""`launch`: start one rank on each of some workers; after a failure, start again.

A run has one attempt or more; each goes on from the newest checkpoint. Commands go client -> agent
-> rank, and messages come back the same way. Relies on the workers being processes that can import
`ddp_common`. Promises: when `launch` returns or raises, every rank that it started is gone and the
workers are free. (Where a worker or the scheduler does not answer within seconds, the agents end
their ranks without being told.)
"""

import inspect
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_common.client import tables, told
from ddp_common.client.attempt import Attempt
from ddp_common.client.connection import refuse_unusable
from ddp_common.client.inbox import open_inbox
from ddp_common.client.listener import FromCallback, Listener, refuse_inside
from ddp_common.client.payload import pickled, refuse_wrong_arguments
from ddp_common.client.placement import claimed_workers
from ddp_common.client.tables import Tables
from ddp_common.errors import Error, RankFailed, RunStopped, first_line
from ddp_common.files import absolute
from ddp_common.run.config import current, run_to_resume
from ddp_common.run.places import new_directory
from ddp_common.run.progress import explain_interrupt, say_place
from ddp_common.run.result import Run
from ddp_common.run.run_directory import RunDirectory
from ddp_common.values import whole_number

PLACEMENT_TIMEOUT = 60  # seconds to wait for free workers
STALL_TIMEOUT = 600  # seconds that a rank may live without making progress


def launch(
    client: Any,
    function: Callable,
    *,
    workers: int | None = None,
    restarts: int | None = None,
    stall_timeout: float | None = STALL_TIMEOUT,
    directory: str | Path | None = None,
    timeout: float = PLACEMENT_TIMEOUT,
    on_report: Callable[[dict], Any] | None = None,
    **arguments: Any,
) -> Run:
    """Run `function(**arguments)` on one rank for each worker and return a `Run`.

    `client` is a `distributed.Client`, or what `connect` gives under torchrun and srun: there the
    ranks are running already, and only `directory`, `stall_timeout`, `on_report` and `arguments`
    matter. `workers` is the number of ranks (default: as many as the cluster has workers);
    launches that find too few free ones wait up to `timeout` seconds, and raise `Error` then.

    A Dask DataFrame, Series, Array or Bag, or a list of futures, among `arguments` arrives in each
    rank as the partitions that lie on its worker (`Rows`). Those of one length, or in one list,
    tuple or dict, belong together: a rank gets the same partitions of each.

    After a failure it starts again from the newest good checkpoint, up to `restarts` times
    (default: RESTARTS from the environment, else 0), on as many workers as there are then. With
    `workers`, it is exactly that many: where fewer are left it waits for others to come, up to
    `timeout` seconds, and raises `Error` then, which also says why it was to restart.

    A rank that makes no progress for `stall_timeout` seconds is a failure (None: never); progress
    is a step of a sampler or an optimizer, a batch of an evaluation, a report, a saved file or
    checkpoint. `directory` continues in an earlier run's directory, whose newest checkpoint
    `Checkpoint.restore` then finds; default: a new one, or what RESUME names for the first
    launch of a tutorial.

    `on_report` is called here, in this thread, with every record that `Run.metrics` will have, as
    a dict with `rank`, `time` (s since 1970), the position in training and what was reported;
    what it raises ends the ranks and is raised. Training does not wait for it. Under torchrun and
    srun it is called on rank 0, with all records, when the function has returned.

    Raises `RankFailed` as soon as any rank fails, `RunStopped` when ranks left because they
    got SIGTERM (both only when restarts are used up), `SchedulerLost`, and `Error` for mistakes
    that are found before anything starts.
    """
    if on_report is not None and not callable(on_report):
        raise Error(f"on_report is to be a function of one record, not {on_report!r}.")
    refuse_wrong_arguments(function, arguments, OPTIONS)
    arguments, collections = tables.find(arguments)
    if hasattr(client, "run_here"):
        # The ranks are running already: torchrun or srun has started them
        tables.refuse_without_dask(collections)
        return client.run_here(function, arguments, directory, on_report, stall_timeout)
    refuse_unusable(client)
    refuse_inside()
    payload = pickled(function, arguments)
    wanted = restarts if restarts is not None else os.environ.get("RESTARTS") or 0
    restarts = whole_number("restarts", wanted, least=0)
    if directory:
        directory = absolute(directory)  # now: the program may change its working directory

    began = time.monotonic()
    run_directory: RunDirectory | None = None
    listener: Listener | None = None
    failures: list[Exception] = []
    previous: Exception | None = None  # what ended the attempt before
    attempts_begun = 0
    own_tables = Tables(client, collections)
    try:
        while True:
            attempt_id = uuid.uuid4().hex[:12]
            if hasattr(client, "make_ready"):  # one of `connect`: it may have to submit jobs anew
                client.make_ready(failed=previous is not None)
            own_tables.ready(timeout)
            with (
                open_inbox(client, attempt_id) as inbox,
                claimed_workers(
                    client, attempt_id, workers, timeout, own_tables.rows_held()
                ) as addresses,
            ):
                if run_directory is None:
                    run_directory = _open_directory(function, directory)
                    if current.name is None:  # `make run` says it of a tutorial
                        say_place(run_directory.path)
                    listener = Listener(on_report, run_directory)
                assert listener is not None, "made with the directory"
                try:
                    attempt = Attempt(
                        client,
                        attempt_id,
                        addresses,
                        inbox,
                        run_directory,
                        stall_timeout,
                        own_tables,
                        listener,
                    )
                    attempts_begun += 1
                    result = attempt.run(payload, previous, number=attempts_begun)
                except (RankFailed, RunStopped) as failure:
                    if attempts_begun > restarts or told.stop_requested:
                        listener.tell_all()
                        raise
                    previous = failure
                    failures.append(failure)
                else:
                    listener.tell_all()
                    run_directory.close()  # now: it may have to say that something was not written
                    return Run(
                        result=result,
                        directory=run_directory.path,
                        world_size=len(addresses),
                        records=run_directory.records,
                        seconds=time.monotonic() - began,
                        failures=failures,
                        problems=run_directory.problems,
                    )
    except FromCallback as carrier:
        assert run_directory is not None, "it has had a record"
        raised = carrier.error
        run_directory.log(f"on_report raised {raised!r}: the ranks were ended")
        raised.add_note(
            "on_report raised this, and the ranks were ended. What was saved is in "
            f"{run_directory.path}; launch with directory= to go on."
        )
    except KeyboardInterrupt as interrupt:
        if run_directory is not None:
            run_directory.log("interrupted from the keyboard")
            path = run_directory.path
            interrupt.directory = path  # type: ignore[attr-defined]  # not ours, but read as such
            explain_interrupt(interrupt, function, run_directory)
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
    # Outside of every `except`: within one, Python would give it another cause.
    raise raised


# What `launch` takes for itself; all other names are arguments of the function.
OPTIONS = inspect.getfullargspec(launch).kwonlyargs


def _open_directory(function: Callable, directory: str | Path | None) -> RunDirectory:
    name = getattr(function, "__name__", "run")
    place = directory or run_to_resume(name) or new_directory(current.name or name)
    opened = RunDirectory(place)
    opened.function = name
    return opened
