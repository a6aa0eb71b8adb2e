"""The client's side of a run: choose workers, start one rank on each, start again from the newest checkpoint when one fails.

Data flows one way: client -> agent -> rank -> reports -> client. Relies on the workers being processes that can import `ddp_common`;
`attempt` follows one set of ranks. Promises: never two ranks on a worker, also with several launches at once; when `launch` returns
or raises, every rank it started is gone and the workers are free.
"""

import os
import time
import uuid

from ddp_common.client import attempt as attempt_module
from ddp_common.client.connection import refuse_unusable
from ddp_common.client.inbox import open_inbox
from ddp_common.client.payload import pickled
from ddp_common.client.placement import placement
from ddp_common.errors import Error, RankFailed, RunStopped
from ddp_common.files import absolute
from ddp_common.run.config import current, run_to_resume
from ddp_common.run.places import new_directory
from ddp_common.run.progress import explain_interrupt
from ddp_common.run.result import Run
from ddp_common.run.run_directory import RunDirectory
from ddp_common.values import whole_number

PLACEMENT_TIMEOUT = 60  # seconds to wait for free workers
STALL_TIMEOUT = 600  # seconds that a rank may live without getting on


def launch(
    client,
    function,
    *,
    workers=None,
    min_workers=None,
    restarts=None,
    stall_timeout=STALL_TIMEOUT,
    directory=None,
    timeout=PLACEMENT_TIMEOUT,
    **arguments,
):
    """Run `function(**arguments)` on one rank per worker and return a `Run`.

    `client` is a `distributed.Client`, or what `connect` gives under torchrun and srun: there the ranks are running already, and only
    `directory` and `arguments` matter. `workers` is the number of ranks (default: as many as the cluster has workers); launches
    that find too few free ones wait up to `timeout` seconds, or start with fewer once there are `min_workers`. After a failure it
    starts again from the newest good checkpoint, on the workers there are then, up to `restarts` times (default: RESTARTS from the
    environment, else 0). A rank that makes no progress for `stall_timeout` seconds is a failure (None: never); progress is a step of
    a sampler or an optimizer, a batch of an evaluation, a report, a saved file or checkpoint. `directory` continues in an earlier run's directory, whose newest checkpoint
    `Checkpoint.restore` then finds; default: a new one, or what RESUME names for the first launch of a tutorial.
    Raises `RankFailed` as soon as any rank fails, `RunStopped` when ranks left because they got SIGTERM, `SchedulerLost`, and `Error`
    for what can be put right before.
    """
    if hasattr(client, "run_here"):  # the ranks are running already
        return client.run_here(function, arguments, directory)
    refuse_unusable(client)
    payload = pickled(function, arguments)
    restarts = whole_number(
        "restarts", os.environ.get("RESTARTS") or 0 if restarts is None else restarts, least=0
    )
    directory = (
        absolute(directory) if directory else directory
    )  # what it means now, wherever the program goes meanwhile
    run_directory, failures, began = None, [], time.monotonic()
    try:
        while True:
            run_id = uuid.uuid4().hex[:12]
            if hasattr(client, "make_ready"):  # one of `connect`
                client.make_ready(bool(failures))
            with (
                open_inbox(client, run_id) as inbox,
                placement(client, run_id, workers, min_workers, timeout) as addresses,
            ):
                run_directory = run_directory or _open_directory(function, directory)
                try:
                    attempt = attempt_module.Attempt(
                        client, run_id, addresses, inbox, run_directory, stall_timeout
                    )
                    result = attempt.run(payload, *failures[-1:], number=len(failures) + 1)
                    run_directory.close()  # now: it may have to say that something was not written
                    return Run(
                        result,
                        run_directory.path,
                        len(addresses),
                        run_directory.records,
                        time.monotonic() - began,
                        failures,
                        run_directory.problems,
                    )
                except (RankFailed, RunStopped) as failure:
                    if len(failures) == restarts or attempt_module.stop_requested:
                        raise
                    failures.append(failure)
    except KeyboardInterrupt as interrupt:
        if run_directory is not None:
            run_directory.log("interrupted from the keyboard")
            interrupt.directory = run_directory.path
            explain_interrupt(interrupt, function, run_directory)
        raise
    except Error as error:
        if failures and not isinstance(error, (RankFailed, RunStopped)):
            error.args = (
                f"{error}\nIt was to restart because: {str(failures[-1]).splitlines()[0]}",
            )
            error.directory = run_directory.path
        raise
    finally:
        if run_directory is not None:
            run_directory.close()


def _open_directory(function, directory):
    name = getattr(function, "__name__", "run")
    opened = RunDirectory(directory or run_to_resume(name) or new_directory(current.name or name))
    opened.function = name
    return opened
