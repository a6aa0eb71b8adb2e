"""The front door of the clusters: a profile in, a connected client out.

Relies on `profiles` for what to start, on `jobs` where workers are batch jobs, on Dask's own
settings for the credentials of a cluster that somebody else has started, and on `shipping` where
workers lack this package. Promises: when `connect` returns, the wanted number of workers is there
and importing torch ahead of the first launch; when they do not come, or no scheduler answers at an
address, it says why; when its client is closed, so is the cluster that it started.
"""

import asyncio
import contextlib
import importlib.util
import math
import os
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import dask
from dask.system import CPU_COUNT
from distributed import LocalCluster, Nanny, Worker
from distributed.comm import connect as connect_to
from distributed.security import Security

from ddp_common.clusters import protection, shipping
from ddp_common.clusters.client import (
    ClusterClient,
    cell_that_runs,
    dask_is_silent,
    earlier_in_notebook,
    open_clients,
)
from ddp_common.clusters.jobs import (
    Jobs,
    check_commands,
    job_script,
    processes_in_a_job,
    refused,
)
from ddp_common.clusters.profiles import (
    cluster_class,
    gpus,
    is_batch,
    meant,
    names_of_options,
    number_of_workers,
    read_profile,
)
from ddp_common.errors import Error, first_line
from ddp_common.run import progress
from ddp_common.values import YES
from ddp_common.without_dask.launchers import LAUNCHERS, started_by
from ddp_common.worker.fork_server import ForkServer
from ddp_common.worker.plugin import Preload

if TYPE_CHECKING:
    from ddp_common.without_dask.ranks import Ranks

ANSWER_TIMEOUT = 10  # seconds that a scheduler has to answer at an address
START_TIMEOUT = 60  # seconds that a cluster has to stand; its workers may come later
HALF_TIMEOUT = 10  # seconds that it has after Ctrl-C
SETTINGS = {
    "distributed.worker.daemon": False,  # ranks are children of workers
    # After this, a connection to a host that has vanished counts as closed; Dask takes no less.
    "distributed.comm.timeouts.tcp": "11s",
    # After this, Dask would give up a worker for good, also one that its nanny has brought back
    # and that has died again, and cancel its job. Nannies and `Jobs` know better.
    "distributed.deploy.lost-worker-timeout": "10000 hours",
}
RANK_OF_WORKER = "DDP_WORKER_PROCESS"  # a variable of ranks on Dask's workers
HASH_SEED = "6640"  # what Dask's nanny gives its workers, so that they hash alike

# Cores are for ranks, and a worker's web server has nothing to tell that the scheduler's does not.
# Of each topic and connection Dask keeps the last thousand messages: with many reports, hundreds
# of MB.
LEAN = {
    "worker": {"profile": {"enabled": False}, "http": {"routes": []}},
    "admin": {
        "tick": {"interval": "500ms"},
        "system-monitor": {"interval": "2s"},
        "low-level-log-length": 100,
    },
}


def connect(
    profile: str | None = None,
    workers: int | str | None = None,
) -> "ClusterClient | Ranks":
    """Start the cluster of a profile and return a client to it.

    Use it in a `with` block or close it.

    `profile` is a name in `clusters/`, the path of a YAML file or an address (default: CLUSTER
    from the environment, else `local`). `workers` is their number (default: WORKERS from the
    environment, else the profile's, or all that are at the address). It returns when they are
    there.

    At the address of a scheduler (tcp://host:port, tls://host:port) it starts nothing, and leaves
    the cluster there when it is closed. Where torchrun, srun, mpiexec or another launcher has
    started this process as one of several ranks (CLUSTER unset or naming them) it joins these
    instead and returns a `without_dask.ranks.Ranks`. With DRY=1 it prints what would be started,
    such as a job script, and ends the program.

    Raises `Error` for an unknown or faulty profile, a number that is none, workers that do not
    appear in time, and a launcher that does not say where rank 0 is.
    """
    launcher = started_by()
    if RANK_OF_WORKER in os.environ:  # a script that `ddprun` has started
        return _join_ranks("torchrun")
    name = profile or os.environ.get("CLUSTER") or launcher or "local"
    if name in LAUNCHERS or name == launcher:
        return _join_ranks(name)
    if launcher == "torchrun":
        raise Error(
            f"CLUSTER={name}, and torchrun has started this process as one of several: each would "
            "start a cluster.\nUnset CLUSTER, or start the program without torchrun."
        )

    wanted = workers if workers is not None else os.environ.get("WORKERS")
    if os.environ.get("DRY", "").lower() in YES:
        print(describe(name, wanted))
        raise SystemExit
    dask.config.set(SETTINGS)
    dask.config.update_defaults({"distributed": LEAN})
    content = read_profile(name)
    earlier = earlier_in_notebook(name, content, wanted)
    if earlier is not None:
        return earlier

    if "://" in name:
        client = _at_address(content, wanted)
    else:
        client = _start(content, wanted)
    client.cell = cell_that_runs()
    client.request = (name, content, wanted)
    try:
        client.wait_until_there()
        if name != "local":
            shipping.provide(client)
        client.register_plugin(Preload(client.fork_server.path if client.fork_server else None))
        if wanted and len(client.workers()) > client.expected:
            client.most = client.expected
    except BaseException:
        client.close()
        raise

    open_clients.add(client)
    _show_dashboard(client)
    return client


def _at_address(profile: dict, wanted: int | str | None) -> ClusterClient:
    """A client of the scheduler at the profile's address; `wanted` is the number of workers.

    What is no Dask scheduler is an `Error` within seconds, which says what is there instead.
    """
    address = profile["cluster"]
    count = 1 if wanted is None else number_of_workers(wanted)
    security = protection.Credentials()
    try:
        with dask_is_silent():
            # A `Client` would wait forever for a port that takes connections and says nothing.
            # The thread: in a notebook the main one has a running event loop.
            with ThreadPoolExecutor(1) as own_thread:
                own_thread.submit(asyncio.run, _shake_hands(address, security)).result()
            client = ClusterClient(address, security=security, timeout=ANSWER_TIMEOUT)
    except Exception as error:  # what does not speak Dask's protocol may look like anything
        raise Error(
            f"CLUSTER={address}: no Dask scheduler could be reached there: {_why_not(error)}.\n"
            "Is it running, is the port right (the dashboard's is another), does it speak TLS? "
            "For tls://, name the credentials in DASK_DISTRIBUTED__COMM__TLS__CA_FILE, "
            "…__TLS__CLIENT__CERT and …__TLS__CLIENT__KEY."
        ) from None
    client.timeout = profile["timeout"]
    client.expected = count
    return client


async def _shake_hands(address: str, security: Security) -> None:
    arguments = security.get_connection_args("client")
    greeting = connect_to(address, timeout=ANSWER_TIMEOUT, **arguments)
    connection = await asyncio.wait_for(greeting, ANSWER_TIMEOUT + 1)
    connection.abort()


def _why_not(error: Exception) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(error, MemoryError):  # it took the first bytes for the length of a message
        return "what answers does not speak Dask's protocol"
    cause = error.__cause__ or error
    if not str(cause):
        return f"no answer within {ANSWER_TIMEOUT} s"
    return first_line(cause).rpartition("Error: ")[2]


def _join_ranks(launcher: str) -> "Ranks":
    if started_by() != launcher:
        raise Error(
            f"CLUSTER={launcher}: this process was not started by {launcher}. "
            f"Use `make run TUTORIAL=… CLUSTER={launcher}`, which does so, "
            f"or start the script with {launcher} yourself."
        )
    from ddp_common.without_dask.ranks import Ranks  # not above: it imports torch

    return Ranks()


def _start(profile: dict, wanted: int | str | None) -> ClusterClient:
    """A client of the cluster that a profile describes, whose workers may be yet to come."""
    count = number_of_workers(wanted if wanted is not None else profile["workers"])
    jobs = cluster = client = fork_server = None
    try:
        name = profile["cluster"] if is_batch(profile) else _class_and_options(profile, count)[0]
        cluster_class(name)  # in this thread: dask-jobqueue sets the handler of a signal
        if is_batch(profile):
            jobs = made_in_time(lambda: Jobs(profile))
            cluster = jobs.cluster
        else:
            if _starts_processes_here(profile):
                fork_server = ForkServer(_environment_of_workers(profile["options"]))
            cluster = made_in_time(lambda: _make_cluster(profile, count))
        client = ClusterClient(cluster.scheduler_address, security=cluster.security)
        client.cluster = cluster
        client.jobs = jobs
        client.fork_server = fork_server
        client.timeout = profile["timeout"]
        client.expected = count
        if jobs is not None:
            jobs.submit(count)
            print(
                f"Job logs and credentials: {jobs.directory}\n"
                f"Dashboard, on {socket.gethostname()} only: {client.dashboard_link}",
                file=sys.stderr,
            )
        elif "LocalCluster" not in profile["cluster"]:
            cluster.scale(count)
    except BaseException as error:
        if client is not None:
            client.close()
        elif jobs is not None:
            jobs.close()
        elif cluster is not None:
            cluster.close()
        if client is None and fork_server is not None:
            fork_server.close()
        if isinstance(error, Error) or not isinstance(error, Exception):
            raise
        raise _explained(profile, error) from error
    return client


def _explained(profile: dict, error: Exception) -> Error:
    """What a cluster class says of its options, as an `Error`."""
    cause = error.__cause__ or error
    if is_batch(profile) and isinstance(cause, (TypeError, ValueError, AttributeError)):
        return refused(profile, cause)
    if isinstance(cause, (TypeError, ValueError, RuntimeError, OSError)):
        said = str(cause)
    else:
        said = f"{type(cause).__name__}: {cause}"
    return Error(
        f"{profile['cluster']} could not be started with the profile's options: "
        f"{said.rstrip('.')}.\nThey stand in OPTIONS, or in the profile."
    )


def made_in_time(make: Callable[[], Any]) -> Any:
    """What `make` returns, a cluster; a thread calls it, as Dask waits for processes for ever.

    Ctrl-C waits until the cluster stands, up to `HALF_TIMEOUT` seconds: Dask cannot close half of
    one. In the thread it is blocked, and so in the processes of workers, which would end with a
    traceback of what they import. Raises what `make` raises, and `Error` after `START_TIMEOUT`
    seconds.
    """
    made: Future = Future()

    def fill() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # raised again in the thread of the caller
            made.set_exception(error)

    resource_tracker.ensure_running()  # else the first process that is started unblocks it
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=fill, daemon=True, name="ddp-cluster").start()
    signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
    try:
        if wait([made], START_TIMEOUT).not_done:
            raise Error(
                f"The cluster has not started within {START_TIMEOUT} s. What its processes have "
                "printed says why. Do limits of this shell forbid more of them, or files (`ulimit "
                "-u`, `ulimit -n`)? Does a debugger run the program (python -m pdb)?"
            )
        return made.result()
    except KeyboardInterrupt:
        with contextlib.suppress(Exception):  # it is the interrupt that is told
            made.result(HALF_TIMEOUT).close()
        raise


def _environment_of_workers(options: dict) -> dict[str, str]:
    """What Dask's nanny makes of this process's environment; `options` are the cluster's."""
    environment = {**os.environ, **(options.get("env") or {})}
    for key in ("pre-spawn-environ", "environ"):
        for name, value in dask.config.get(f"distributed.nanny.{key}").items():
            if value is not None:
                environment.setdefault(name, str(value))
    if environment.get("PYTHONHASHSEED", "0") == "0":
        environment["PYTHONHASHSEED"] = HASH_SEED
    return environment


def _starts_processes_here(profile: dict) -> bool:
    """Whether workers are processes of this host that may share a torch without GPUs."""
    name, options = _class_and_options(profile, 1)
    return name.endswith("LocalCluster") and options.get("processes") is not False


def _make_cluster(profile: dict, count: int) -> Any:
    name, options = _class_and_options(profile, count)
    cls = cluster_class(name)
    if isinstance(cls, type) and issubclass(cls, LocalCluster):
        protection.keep_scripts_out_of_workers()
        options = {**protection.scratch_option(), **options}
    security = options.pop("security", None)
    if security is True:
        options["security"] = protection.credentials()
    elif security:
        options["security"] = security
    return protection.private(cls)(n_workers=count, **options)


def _class_and_options(profile: dict, count: int) -> tuple[str, dict[str, Any]]:
    """The name of the cluster class, and its keyword arguments.

    `security` is True for a cluster that is to speak TLS with credentials of its own.
    """
    name = profile["cluster"]
    if gpus() and profile["gpu_cluster"]:
        name = profile["gpu_cluster"]
        if count > gpus():
            raise Error(
                f"WORKERS={count}: each worker takes a GPU, and this machine has {gpus()}. Ask "
                "for no more, or train on the CPU: set CUDA_VISIBLE_DEVICES to nothing."
            )
    defaults = {}
    options = profile["options"]
    if "LocalCluster" in name:
        _check_options(profile)
        defaults["threads_per_worker"] = max(1, CPU_COUNT // count)
    has_processes = options.get("processes") is not False
    speaks_tls = str(options.get("protocol") or "tls").startswith("tls")
    if re.search(r"Local(CUDA)?Cluster$", name) and speaks_tls and has_processes:
        defaults["security"] = True
    return name, {**defaults, **options}


def _check_options(profile: dict) -> None:
    """Raise `Error` for options of no `LocalCluster`: Dask would say so when a worker starts."""
    known = names_of_options(LocalCluster, Nanny, Worker)
    for option in profile["options"]:
        if option not in known:
            raise Error(
                f"{profile['cluster']} has no option {option!r}{meant(option, known)}.\n"
                "It stands in OPTIONS, or in the profile. Those of jobs need CLUSTER=slurm or pbs."
            )


def _show_dashboard(client: ClusterClient) -> None:
    """Say where Dask's dashboard is, if somebody watches; for jobs `_start` has done so."""
    if client.jobs is not None or client.cluster is None:
        return
    if progress.mode() is progress.Mode.BAR and importlib.util.find_spec("bokeh"):
        # What a notebook's cell says on stderr looks like an error.
        stream = sys.stderr if cell_that_runs() is None else sys.stdout
        print(f"Dask's dashboard: {client.dashboard_link}", file=stream, flush=True)


def check(name: str) -> None:
    """Raise `Error` for what can be known of a profile to be wrong before anything is started."""
    profile = read_profile(name)
    if is_batch(profile):
        job_script(profile)
        check_commands(profile)
    else:
        _class_and_options(profile, 1)


def describe(name: str, workers: int | str | None = None) -> str:
    """What `connect` would start: a job script, a call, an address. Starts nothing.

    Raises `Error` as `connect` does.
    """
    if "://" in name:
        return f"Nothing would be started: there is a scheduler at {name}."
    profile = read_profile(name)
    count = number_of_workers(workers or profile["workers"])
    if is_batch(profile):
        jobs = math.ceil(count / processes_in_a_job(profile))
        return "\n".join([*_about_jobs(name, jobs, count), job_script(profile)])
    cls, options = _class_and_options(profile, count)
    options = {"n_workers": count, **options}
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"# No jobs: the cluster is one call.\n{cls}({arguments})"


def _about_jobs(name: str, jobs: int, count: int) -> list[str]:
    """What a job script does not say of itself: lines of comment above it."""
    options = os.environ.get("OPTIONS")
    doctor = f"make doctor CLUSTER={shlex.quote(name)}"
    if options:
        doctor += f" OPTIONS={shlex.quote(options)}"
    return [
        f"# {jobs} job(s) such as this one, for {count} rank(s):",
        "# Each starts Dask workers, to which your program sends its function later. The program",
        "# itself stays where you start it, and submits the jobs. TIME and SCHEDULER:PORT are",
        "# known then. The `export` lines are ours: nothing to change.",
        f"# Next: {doctor}",
    ]
