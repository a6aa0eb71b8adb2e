"""`launch`: what a user calls, and the checks of what it is given.

For a client of Dask, `restarts.on_workers` starts the ranks; where torchrun or srun has started
them, what stands for the client is a `without_dask.ranks.Ranks`. Promises: a mistake is found
before anything starts.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dask_ranks.client import signals, tables
from dask_ranks.client.payload import refuse_wrong_arguments
from dask_ranks.client.restarts import on_workers
from dask_ranks.run.folders import check_folder, local
from dask_ranks.run.job import Job, Run, whole_number

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
    it.) `run_config` is what the run's config.json says besides versions and workers, such as the
    settings of the program.

    `on_report` is called here, in this thread, with every record as it comes: a dict with
    `restart`, `rank`, `time` (s since 1970), the position in training and what was reported. After
    a restart steps come again. What it raises ends the ranks and is raised. Training does not wait
    for it; a failure, or Ctrl-C, is noticed when it returns. Under torchrun and srun it is called
    on rank 0, with all records, when the function has returned.

    Raises `RankFailed` as soon as any rank fails, `RunStopped` when ranks left because they or
    this program got SIGTERM (both only when restarts are used up), `SchedulerLost`, and `Error`
    for mistakes, which are found before anything starts, and where somebody else has ended the
    ranks.
    """
    refuse_wrong_arguments(function, arguments, OPTIONS)
    arguments, collections = tables.find(arguments)
    if directory:
        directory = local(directory)  # now: the program may change its working directory
    if directory is not False:
        check_folder(directory)  # before tables are computed
    wanted = restarts if restarts is not None else os.environ.get("RESTARTS") or 0
    job = Job(
        function=function,
        arguments=arguments,
        tables=collections,
        workers=None if workers is None else whole_number("workers", workers, least=1),
        restarts=whole_number("restarts", wanted, least=0),
        stall_timeout=stall_timeout,
        directory=directory,
        timeout=timeout,
        on_report=on_report,
        run_name=run_name,
        run_config={} if run_config is None else run_config,
    )
    is_rank = hasattr(client, "launch")  # this process: it is a `without_dask.ranks.Ranks`
    with signals.heard(sigterm_too=not is_rank):
        return client.launch(job) if is_rank else on_workers(client, job)


# What `launch` takes for itself; all other names are arguments of the function.
OPTIONS = inspect.getfullargspec(launch).kwonlyargs
