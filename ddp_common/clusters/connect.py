"""The front door of the clusters: a profile in, a connected client out.

Relies on `profiles` for what to start, on `jobs` where workers are batch jobs, on `at_address`
where somebody else has started the cluster, and on `shipping` where workers lack this package.
Promises: when `connect` returns, the wanted number of workers is there and importing torch ahead
of the first launch; when they do not come, it says why; when its client is closed, so is the
cluster that it started.
"""

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
from typing import TYPE_CHECKING

import dask
from dask.system import CPU_COUNT
from distributed import LocalCluster

from ddp_common.clusters import notebooks, protection, shipping
from ddp_common.clusters.at_address import at_address
from ddp_common.clusters.client import ClusterClient, open_clients
from ddp_common.clusters.jobs import Jobs, job_script, processes_in_a_job, refused
from ddp_common.clusters.profiles import (
    cluster_class,
    gpus,
    is_batch,
    number_of_workers,
    read_profile,
)
from ddp_common.errors import Error
from ddp_common.run.progress import Progress
from ddp_common.values import YES
from ddp_common.without_dask.launchers import LAUNCHERS, started_by
from ddp_common.worker.nursery import ForkServer
from ddp_common.worker.plugin import Preload

if TYPE_CHECKING:
    from ddp_common.without_dask.ranks import Ranks

SETTINGS = {
    "distributed.worker.daemon": False,  # ranks are children of workers
    # After this, a connection to a host that has vanished counts as closed; Dask takes no less.
    "distributed.comm.timeouts.tcp": "11s",
    # After this, Dask would give up a worker for good, also one that its nanny has brought back
    # and that has died again, and cancel its job. Nannies and `Jobs` know better.
    "distributed.deploy.lost-worker-timeout": "10000 hours",
}
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
    name = profile or os.environ.get("CLUSTER") or launcher or "local"
    if name in LAUNCHERS or name == launcher:
        return _join_ranks(name)

    wanted = workers if workers is not None else os.environ.get("WORKERS")
    if os.environ.get("DRY", "").lower() in YES:
        print(describe(name, wanted))
        raise SystemExit
    dask.config.set(SETTINGS)
    dask.config.update_defaults({"distributed": LEAN})
    content = read_profile(name)
    earlier = notebooks.earlier_in_notebook(name, content, wanted)
    if earlier is not None:
        return earlier

    if "://" in name:
        client = at_address(content, wanted)
    else:
        client = _start(content, wanted)
    client.cell = notebooks.cell_that_runs()
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


def _join_ranks(launcher):
    if started_by() != launcher:
        raise Error(
            f"CLUSTER={launcher}: this process was not started by {launcher}. "
            f"Use `make run TUTORIAL=… CLUSTER={launcher}`, which does so, "
            f"or start the script with {launcher} yourself."
        )
    from ddp_common.without_dask.ranks import Ranks  # not above: it imports torch

    return Ranks()


def _start(profile, wanted):
    """A client of the cluster that a profile describes, whose workers may be yet to come."""
    count = number_of_workers(wanted if wanted is not None else profile["workers"])
    jobs = cluster = client = fork_server = None
    try:
        with interrupts_held():
            if is_batch(profile):
                jobs = Jobs(profile)
                cluster = jobs.cluster
            else:
                if _starts_processes_here(profile):
                    fork_server = ForkServer(_environment_of_workers(profile["options"]))
                cluster = _make_cluster(profile, count)
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


def _explained(profile, error):
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
        f"{said.rstrip('.')}."
    )


@contextlib.contextmanager
def interrupts_held():
    """Ctrl-C waits until the cluster stands: Dask cannot close half of one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    handler = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:  # whatever became of the cluster: its workers got the signal, too
            raise KeyboardInterrupt from None


def _environment_of_workers(options):
    """What Dask's nanny makes of this process's environment; `options` are the cluster's."""
    environment = {**os.environ, **(options.get("env") or {})}
    for key in ("pre-spawn-environ", "environ"):
        for name, value in dask.config.get(f"distributed.nanny.{key}").items():
            if value is not None:
                environment.setdefault(name, str(value))
    if environment.get("PYTHONHASHSEED", "0") == "0":
        environment["PYTHONHASHSEED"] = HASH_SEED
    return environment


def _starts_processes_here(profile):
    """Whether workers are processes of this host that may share a torch without GPUs."""
    name, options = _class_and_options(profile, 1)
    return name.endswith("LocalCluster") and options.get("processes") is not False


def _make_cluster(profile, count):
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


def _class_and_options(profile, count):
    """The name of the cluster class, and its keyword arguments.

    `security` is True for a cluster that is to speak TLS with credentials of its own.
    """
    name = profile["cluster"]
    if gpus() and profile["gpu_cluster"]:
        name = profile["gpu_cluster"]
    defaults = {}
    if "LocalCluster" in name:
        defaults["threads_per_worker"] = max(1, CPU_COUNT // count)
    options = profile["options"]
    has_processes = options.get("processes") is not False
    speaks_tls = str(options.get("protocol") or "tls").startswith("tls")
    if re.search(r"Local(CUDA)?Cluster$", name) and speaks_tls and has_processes:
        defaults["security"] = True
    return name, {**defaults, **options}


def _show_dashboard(client):
    """Say where Dask's dashboard is, if somebody watches; for jobs `_start` has done so."""
    if client.jobs is not None or client.cluster is None:
        return
    if Progress().mode == "bar" and importlib.util.find_spec("bokeh"):
        # What a notebook's cell says on stderr looks like an error.
        stream = sys.stderr if notebooks.cell_that_runs() is None else sys.stdout
        print(f"Dask's dashboard: {client.dashboard_link}", file=stream, flush=True)


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


def _about_jobs(name, jobs, count):
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
