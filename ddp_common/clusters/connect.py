"""A profile in, a connected client out.

Relies on `profiles` for what to start, on `batch` where workers are jobs, on `shipping` where they lack this package. Promises: when
`connect` returns, the wanted number of workers is there and importing torch ahead of the first launch; when they do not come, it says
why; when its client is closed, so is the cluster that it started.
"""

import importlib.util
import os
import re
import socket
import sys

import dask
from dask.system import CPU_COUNT
from distributed import LocalCluster

from ddp_common.clusters import batch, notebooks, protection, shipping
from ddp_common.clusters.at_address import at_address
from ddp_common.clusters.cluster_client import ClusterClient
from ddp_common.clusters.jobs import Jobs
from ddp_common.clusters.profiles import gpus, number_of_workers, read_profile
from ddp_common.clusters.quiet import interrupts_held
from ddp_common.clusters.waiting import wait_for_workers
from ddp_common.errors import Error
from ddp_common.worker.preload import Preload

SILENCE_TIMEOUT = "11s"  # after which a connection to a host that has vanished counts as closed; Dask takes no less
LEAN = {  # cores are for ranks, and a worker's web server has nothing to tell that the scheduler's does not
    "worker": {"profile": {"enabled": False}, "http": {"routes": []}},
    "admin": {"tick": {"interval": "500ms"}, "system-monitor": {"interval": "2s"}},
}


def connect(profile=None, workers=None):
    """Start the cluster of a profile and return a client to it; use it in a `with` block or close it.

    Under torchrun or srun (CLUSTER unset or naming them) it joins their ranks instead and returns a `without_dask.Ranks`. At the address
    of a scheduler (tcp://host:port, tls://host:port) it starts nothing, and leaves the cluster there when it is closed.

    `profile` is a name in `clusters/`, the path of a YAML file or an address (default: CLUSTER from the environment, else `local`).
    `workers` is their number (default: WORKERS from the environment, else the profile's, or all that are at the address). Raises `Error`
    for an unknown or faulty profile, a number that is none, and workers that do not appear in time, with the reason.
    """
    from ddp_common.without_dask.launchers import LAUNCHERS, started_by
    from ddp_common.without_dask.ranks import Ranks

    name = profile or os.environ.get("CLUSTER") or started_by() or "local"
    if name in LAUNCHERS:
        if started_by() != name:
            raise Error(
                f"CLUSTER={name}: this process was not started by {name}. Use `make run TUTORIAL=… CLUSTER={name}`, which does so, or "
                f"start the script with {name} yourself."
            )
        return Ranks()
    dask.config.set(
        {"distributed.worker.daemon": False, "distributed.comm.timeouts.tcp": SILENCE_TIMEOUT}
    )  # ranks are children of workers
    dask.config.update_defaults({"distributed": LEAN})
    wanted = workers if workers is not None else os.environ.get("WORKERS")
    profile = read_profile(name)
    if (earlier := notebooks.earlier_in_notebook(name, profile, wanted)) is not None:
        return earlier
    client = (at_address if "://" in name else _started)(profile, wanted)
    client.cell, client.request = notebooks.cell_that_runs(), (name, profile, wanted)
    try:
        wait_for_workers(client, client.expected)
        if name != "local":
            shipping.provide(client)
        client.register_plugin(Preload())
        if len(client.workers()) > client.expected and wanted:
            client.most = client.expected
    except BaseException:
        client.close()
        raise
    notebooks.open_clients.add(client)
    if (
        client.jobs is None
        and client.cluster is not None
        and notebooks.is_watched()
        and importlib.util.find_spec("bokeh")
    ):
        print(f"Dask's dashboard: {client.dashboard_link}", file=sys.stderr, flush=True)
    return client


def _started(profile, wanted):
    """A client of the cluster that a profile describes, whose workers may be yet to come."""
    count = number_of_workers(wanted if wanted is not None else profile["workers"])
    jobs = cluster = client = None
    try:
        with interrupts_held():
            if batch.is_batch(profile):
                jobs = Jobs(profile)
                cluster = jobs.cluster
            else:
                cluster = _make_cluster(profile, count)
            client = ClusterClient(cluster.scheduler_address, security=cluster.security)
            client.cluster, client.jobs, client.timeout, client.expected = (
                cluster,
                jobs,
                profile["timeout"],
                count,
            )
        if jobs is not None:
            print(
                f"Job logs and credentials: {jobs.directory}\nDashboard, on {socket.gethostname()} only: {client.dashboard_link}",
                file=sys.stderr,
            )
            jobs.submit(count)
        elif "LocalCluster" not in profile["cluster"]:
            cluster.scale(count)
    except BaseException as error:
        if client is not None:
            client.close()
        elif jobs is not None or cluster is not None:
            (jobs or cluster).close()
        raise _explained(profile, error)
    return client


def _explained(profile, error):
    """What a cluster class says of its options, as an `Error`; everything else as it is."""
    if isinstance(error, Error) or not isinstance(error, Exception):
        return error
    cause = error.__cause__ or error
    said = (
        str(cause)
        if isinstance(cause, (TypeError, ValueError, RuntimeError, OSError))
        else f"{type(cause).__name__}: {cause}"
    )
    return Error(
        f"{profile['cluster']} could not be started with the profile's options: {said.rstrip('.')}."
    ).with_traceback(None)


def _make_cluster(profile, count):
    name, options = _class_and_options(profile, count)
    cls = batch.cluster_class(name)
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
    """The class and its keyword arguments; `security` is True for what is to speak TLS with credentials of its own."""
    name = profile["gpu_cluster"] if gpus() and profile["gpu_cluster"] else profile["cluster"]
    defaults = {"threads_per_worker": max(1, CPU_COUNT // count)} if "LocalCluster" in name else {}
    if re.search(r"Local(CUDA)?Cluster$", name) and not _without_tls(profile["options"]):
        defaults["security"] = True
    return name, {**defaults, **profile["options"]}


def _without_tls(options):
    """Whether these options of a local cluster ask for something that is not TLS: threads, or another protocol."""
    host = str(options.get("host") or "")
    protocol = str(options.get("protocol") or (host if "://" in host else "tls"))
    if options.get("processes") is False or protocol.partition("://")[0] != "tls":
        return True
    return any(options.get(f"enable_{name}") for name in ("tcp_over_ucx", "infiniband", "nvlink"))


def describe(name, workers=None, tutorial="TUTORIAL"):
    """What `make run` would start, as text: a job script, a call, a command, an address. Starts nothing. Raises `Error` as `connect` does."""
    from ddp_common.without_dask.launchers import LAUNCHERS
    from ddp_common.without_dask.ranks import command

    if name in LAUNCHERS:
        return f"# No Dask: {name} starts the ranks.\n" + " ".join(
            command(name, tutorial, number_of_workers(workers or "auto"), restarts=0)
        )
    if "://" in name:
        return f"Nothing would be started: there is a scheduler at {name}."
    profile = read_profile(name)
    count = number_of_workers(workers or profile["workers"])
    if batch.is_batch(profile):
        processes = batch.processes_in_a_job(profile)
        return f"# {-(-count // processes)} job(s) such as this one, for {count} rank(s):\n{batch.job_script(profile)}"
    cls, options = _class_and_options(profile, count)
    arguments = ", ".join(
        f"{key}={value!r}" for key, value in {"n_workers": count, **options}.items()
    )
    return f"# No jobs: the cluster is one call.\n{cls}({arguments})"
