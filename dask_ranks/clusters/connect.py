"""The front door of the clusters: a profile in, a connected client out.

Relies on `profiles` for what to start, on `jobs` where workers are batch jobs, and on Dask's own
settings for the credentials of a cluster that somebody else has started. Promises: when `connect`
returns, the wanted number of workers is there and importing torch ahead of the first launch; when
they do not come, or no scheduler answers at an address, it says why; when its client is closed, so
is the cluster that it started.
"""

import asyncio
import contextlib
import os
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
from distributed.comm import connect as connect_to
from distributed.security import Security

from dask_ranks.client import signals
from dask_ranks.clusters import profiles, protection
from dask_ranks.clusters.client import ClusterClient, Request, dask_is_silent, open_clients
from dask_ranks.clusters.jobs import Jobs, check_commands, from_site, job_script, number_of_jobs
from dask_ranks.run import progress
from dask_ranks.without_dask.launchers import LAUNCHERS, started_by
from dask_ranks.worker.fork_server import ForkServer
from ddp_common.errors import Error, first_line

if TYPE_CHECKING:
    from dask_ranks.without_dask.ranks import Ranks

ANSWER_TIMEOUT = 10  # seconds that a scheduler has to answer at an address
START_TIMEOUT = 60  # seconds that a cluster has to stand; its workers may come later
BUSY_TIMES = 5  # so many times as long, at most, where other programs use the cores, too
HALF_TIMEOUT = 10  # seconds that it has after Ctrl-C
HASH_SEED = "6640"  # what Dask's nanny gives its workers, so that they hash alike
SETTINGS = {
    "distributed.nanny.pre-spawn-environ.PYTHONHASHSEED": HASH_SEED,  # unless it is set here
    "distributed.worker.daemon": False,  # ranks are children of workers
    # After this, a connection to a host that has vanished counts as closed; Dask takes no less.
    "distributed.comm.timeouts.tcp": "11s",
    # After this, Dask would give up a worker for good, also one that its nanny has brought back
    # and that has died again, and cancel its job. Nannies and `Jobs` know better.
    "distributed.deploy.lost-worker-timeout": "10000 hours",
    # Cores are for ranks, and a worker's web server tells nothing that the scheduler's does not.
    "distributed.worker.profile.enabled": False,
    "distributed.worker.http.routes": [],
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "2s",
    # Of each topic and connection Dask keeps so many messages: with many reports, a lot of MB.
    "distributed.admin.low-level-log-length": 100,
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
    there. An open client of the same request is returned again; the last `with` closes it, and
    `close` does at once.

    At the address of a scheduler (tcp://host:port, tls://host:port) it starts nothing, and leaves
    the cluster there when it is closed. Where torchrun, srun, mpiexec or another launcher has
    started this process as one of several ranks (CLUSTER unset or naming them) it joins these
    instead and returns a `without_dask.ranks.Ranks`. With DRY=1 it prints what would be started,
    such as a job script, and ends the program.

    Raises `Error` for an unknown or faulty profile, a number that is none, workers that do not
    appear in time, and a launcher that does not say where rank 0 is.
    """
    launcher = started_by()
    if "DDP_WORKER_PROCESS" in os.environ:  # in a script that `ddprun` has started
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
    if os.environ.get("DRY", "").lower() in ("true", "1", "yes"):
        print(describe(name, wanted))
        raise SystemExit
    dask.config.set(SETTINGS)
    if dask.config.get("temporary-directory") is None:
        dask.config.set({"temporary-directory": protection.private_folder()})
    content = profiles.read_profile(name)
    default = 1 if "://" in name else content["workers"]
    count = profiles.number_of_workers(default if wanted is None else wanted)
    request = Request(name, content, count, is_limited=bool(wanted))
    for earlier in open_clients:
        if earlier.request == request and earlier.status == "running":
            earlier.times_given += 1
            earlier.wait_until_there()
            return earlier

    client = _at_address(request) if "://" in name else _start(request)
    try:
        client.make_usable()
        if signals.interrupted:  # by a Ctrl-C whose exception Python has lost in a callback
            raise KeyboardInterrupt
    except BaseException:
        client.close()
        raise

    open_clients.add(client)
    drawing = progress.Progress()
    if client.cluster is not None and drawing.mode is progress.Mode.BAR:  # somebody watches
        drawing.note(f"Dask's dashboard: {client.dashboard_link}")
    return client


def _at_address(request: Request) -> ClusterClient:
    """A client of the scheduler at an address.

    What is no Dask scheduler is an `Error` within seconds, which says what is there instead.
    """
    address = request.name
    security = protection.Credentials()
    try:
        with dask_is_silent():
            # A `Client` would wait forever for a port that takes connections and says nothing.
            # The thread: in a notebook the main one has a running event loop.
            with ThreadPoolExecutor(1) as own_thread:
                own_thread.submit(asyncio.run, _shake_hands(address, security)).result()
            return ClusterClient(address, security, request, timeout=ANSWER_TIMEOUT)
    except Exception as error:  # what does not speak Dask's protocol may look like anything
        why = first_line(error.__cause__ or error).rpartition("Error: ")[2]
        raise Error(
            f"CLUSTER={address}: no Dask scheduler could be reached there: {why}.\n"
            "Is it running, is the port right (the dashboard's is another), does it speak TLS? "
            "For tls://, name the credentials in DASK_DISTRIBUTED__COMM__TLS__CA_FILE, "
            "…__TLS__CLIENT__CERT and …__TLS__CLIENT__KEY."
        ) from None


async def _shake_hands(address: str, security: Security) -> None:
    arguments = security.get_connection_args("client")
    greeting = connect_to(address, timeout=ANSWER_TIMEOUT, **arguments)
    connection = await asyncio.wait_for(greeting, ANSWER_TIMEOUT + 1)
    connection.abort()


def _join_ranks(launcher: str) -> "Ranks":
    if started_by() != launcher:
        raise Error(
            f"CLUSTER={launcher}: this process was not started by {launcher}. "
            f"Use `make run TUTORIAL=… CLUSTER={launcher}`, which does so, "
            f"or start the script with {launcher} yourself."
        )
    from dask_ranks.without_dask.ranks import Ranks  # not above: it imports torch

    return Ranks()


def _start(request: Request) -> ClusterClient:
    """A client of the cluster that a profile describes, whose workers may be yet to come."""
    profile, count = request.profile, request.workers
    jobs = fork_server = None
    name, options = _class_and_options(profile, count)
    profiles.cluster_class(name)  # in this thread: dask-jobqueue sets the handler of a signal
    try:
        # Nannies would print tracebacks of what they raise. If anything fails, all is closed
        with dask_is_silent(), contextlib.ExitStack() as opened:
            if profiles.is_batch(profile):
                jobs = made_in_time(lambda: Jobs(profile))
                opened.callback(jobs.close)
                cluster = jobs.cluster
                jobs.submit(count)
                print(
                    f"{from_site(profile)}Job logs and credentials: {jobs.directory}\n"
                    f"Dashboard, on {socket.gethostname()} only: {cluster.dashboard_link}",
                    file=sys.stderr,
                )
            else:
                # Workers that are processes of this host may share a torch, without GPUs
                if name.endswith("LocalCluster") and options.get("processes") is not False:
                    fork_server = ForkServer(_environment_of_workers(options))
                    opened.callback(fork_server.close)
                cluster = made_in_time(lambda: _make_cluster(name, options, count))
                if getattr(cluster, "shutdown_on_close", True):  # Saturn's may be told to stay
                    opened.callback(cluster.close)
                if "LocalCluster" not in name:
                    cluster.scale(count)
            client = ClusterClient(
                cluster.scheduler_address,
                cluster.security,
                request,
                cluster=cluster,
                jobs=jobs,
                fork_server=fork_server,
            )
            client.to_close = opened.pop_all()
            return client
    except Error:
        raise
    except Exception as error:  # of any kind: it is the cluster class's own
        raise profiles.refused(profile, error) from error


def made_in_time(make: Callable[[], Any]) -> Any:
    """What `make` returns, a cluster; a thread calls it, as Dask waits for processes for ever.

    Ctrl-C waits until the cluster stands, up to `HALF_TIMEOUT` seconds: Dask cannot close half of
    one. In the thread it is blocked, and so in the processes of workers, which would end with a
    traceback of what they import. Raises what `make` raises, and `Error` after `START_TIMEOUT`
    seconds; on a busy machine that is more, and said.
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
        seconds = START_TIMEOUT
        if wait([made], seconds).not_done:
            load = os.getloadavg()[0]  # programs that want a core, in the mean of a minute
            seconds = round(START_TIMEOUT * min(max(1, load / CPU_COUNT), BUSY_TIMES))
            if seconds > START_TIMEOUT:
                print(
                    f"The cluster has not started within {START_TIMEOUT} s: {load:.0f} programs "
                    f"want the {CPU_COUNT} cores of this machine. It has {seconds} s.",
                    file=sys.stderr,
                )
        if wait([made], seconds - START_TIMEOUT).not_done:
            raise Error(
                f"The cluster has not started within {seconds} s. What its processes have "
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
    nannys = dask.config.get("distributed.nanny")
    defaults = {**nannys["environ"], **nannys["pre-spawn-environ"]}
    set_by_it = {name: str(value) for name, value in defaults.items() if value is not None}
    environment = {**set_by_it, **os.environ, **(options.get("env") or {})}
    if environment.get("PYTHONHASHSEED", "0") == "0":
        environment["PYTHONHASHSEED"] = HASH_SEED
    return environment


def _make_cluster(name: str, options: dict[str, Any], count: int) -> Any:
    protection.keep_scripts_out_of_workers()
    options = {**options}
    security = options.pop("security", None)
    if security:
        options["security"] = protection.credentials() if security is True else security
    return protection.private(profiles.cluster_class(name))(n_workers=count, **options)


def _class_and_options(profile: dict, count: int) -> tuple[str, dict[str, Any]]:
    """The name of the cluster class, and its keyword arguments.

    `security` is True for a cluster that is to speak TLS with credentials of its own.
    """
    name = profile["cluster"]
    if profile["gpu_cluster"] and profiles.gpus():
        name = profile["gpu_cluster"]
        if count > profiles.gpus():
            raise Error(
                f"WORKERS={count}: each worker takes a GPU, and this machine has "
                f"{profiles.gpus()}. Ask for no more, or train on the CPU: set "
                "CUDA_VISIBLE_DEVICES to nothing."
            )
    options = profile["options"]
    if name.endswith(("LocalCluster", "LocalCUDACluster")) and "protocol" not in options:
        options = {"security": True, **options}
    if name.endswith("LocalCluster"):
        options = {"threads_per_worker": max(1, CPU_COUNT // count), **options}
    return name, options


def check(name: str) -> None:
    """Raise `Error` for what can be known of a profile to be wrong before anything is started."""
    describe(name)
    profile = profiles.read_profile(name)
    if profiles.is_batch(profile):
        check_commands(profile)


def describe(name: str, workers: int | str | None = None) -> str:
    """What `connect` would start: a job script, a call, an address. Starts nothing.

    Raises `Error` as `connect` does.
    """
    if "://" in name:
        return f"Nothing would be started: there is a scheduler at {name}."
    profile = profiles.read_profile(name)
    count = profiles.number_of_workers(workers or profile["workers"])
    if profiles.is_batch(profile):
        jobs = number_of_jobs(profile, count)
        script, settings = job_script(profile), from_site(profile)
        return (
            f"# {jobs} job(s) such as this one, for {count} rank(s): each starts Dask workers.\n"
            "# Your program stays where you start it, and submits the jobs. TIME and\n"
            "# SCHEDULER:PORT are known then. The `export` lines are ours: nothing to change.\n"
            "# Next: make doctor, with the same CLUSTER and OPTIONS\n"
            f"{settings and f'# {settings}'}"
            f"{script}"
        )
    cls, options = _class_and_options(profile, count)
    options = {"n_workers": count, **options}
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"# No jobs: the cluster is one call.\n{cls}({arguments})"
