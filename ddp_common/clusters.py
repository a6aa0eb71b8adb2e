"""A profile in, a connected client out.

Relies on `profiles` for what to start, on `batch` where workers are jobs, on `shipping` where they lack this package. Promises: when
`connect` returns, the wanted number of workers is there and importing torch ahead of the first launch; when they do not come, it says
why; when its client is closed, so is the cluster that it started.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import dask
from dask.system import CPU_COUNT
from distributed import Client, LocalCluster
from distributed.comm import connect as connect_to
from distributed.security import Security

from ddp_common import batch, protection, shipping
from ddp_common.agent import Preload
from ddp_common.errors import Error
from ddp_common.profiles import gpus, number_of_workers, read_profile

SILENCE_TIMEOUT = "11s"  # after which a connection to a host that has vanished counts as closed; Dask takes no less
LEAN = {  # cores are for ranks, and a worker's web server has nothing to tell that the scheduler's does not
    "worker": {"profile": {"enabled": False}, "http": {"routes": []}},
    "admin": {"tick": {"interval": "500ms"}, "system-monitor": {"interval": "2s"}},
}
_open_clients = weakref.WeakSet()
GONE_TIMEOUT = 15  # seconds that the workers of cancelled jobs have to leave
ANSWER_TIMEOUT = 10  # seconds that a scheduler has to answer at an address


class ClusterClient(Client):
    """A `distributed.Client` that takes its cluster down with it.

    `jobs` is a `batch.Jobs` where workers are jobs, else None; `most` the number of ranks that were asked for where there are more
    workers, else None.
    """

    cluster = jobs = most = None
    timeout, expected = 60, 1
    cell = request = None  # of a notebook: the cell and its execution that started the cluster; what was asked for

    @property
    def ranks(self):
        """How many ranks a launch would have: the number of workers, unless fewer were asked for."""
        there = len(self.workers())
        return min(self.most or there, there)

    def workers(self):
        """What the scheduler knows of its workers that are ready to work: address -> dict."""
        return {address: worker for address, worker in self.scheduler_info(n_workers=-1)["workers"].items() if worker["status"] == "running"}

    def _repr_html_(self):
        """What a notebook shows: the number of ranks, then what Dask shows, with the dashboard's address."""
        shown = super()._repr_html_()
        return f"<p><strong>{self.ranks} rank(s)</strong> in a launch</p>{shown}" if self.status == "running" else shown

    @property
    def dashboard_link(self):
        """The address of the dashboard; with jobs, one on this host alone, whatever the scheduler's own address is."""
        link = super().dashboard_link
        return re.sub(r"//[^/]*(:\d+)", r"//127.0.0.1\1", link) if self.jobs is not None else link

    def make_ready(self, failed):
        """Before a launch: jobs that have ended, or after a failure are about to, are submitted anew and waited for."""
        if self.jobs is None or (not failed and len(self.workers()) >= self.expected):
            return
        ending = {}
        if failed:
            jobs = {address: self.jobs.job_of(worker) for address, worker in self.workers().items()}
            left = self.run(batch.time_left, on_error="ignore")
            ending = {jobs[address]: "its time limit is near" for address, seconds in left.items() if address in jobs and seconds < 1.5 * self.jobs.warning}
        self.replace({**ending, **ended(self.jobs.states())})
        self.jobs.submit(self.expected)
        _wait(self, self.expected, at_least=1)

    def replace(self, jobs):
        """Cancel jobs (a dict: name -> why) and wait until their workers are gone; `jobs.submit` then makes others."""
        leaving = {address for address, worker in self.workers().items() if self.jobs.job_of(worker) in jobs}
        self.jobs.cancel(jobs)
        deadline = time.monotonic() + GONE_TIMEOUT
        while leaving & set(self.workers()) and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self, *args, **kwargs):
        cluster, self.cluster = self.cluster, None
        with _quiet():  # connections to workers end in the middle of what Dask wanted to tell them
            closed = super().close(*args, **kwargs)
            if self.jobs is not None:
                self.jobs.close()
            elif cluster is not None and getattr(cluster, "shutdown_on_close", True):  # Saturn's may be told to stay
                cluster.close()
        return closed


def connect(profile=None, workers=None):
    """Start the cluster of a profile and return a client to it; use it in a `with` block or close it.

    Under torchrun or srun (CLUSTER unset or naming them) it joins their ranks instead and returns a `without_dask.Ranks`. At the address
    of a scheduler (tcp://host:port, tls://host:port) it starts nothing, and leaves the cluster there when it is closed.

    `profile` is a name in `clusters/`, the path of a YAML file or an address (default: CLUSTER from the environment, else `local`).
    `workers` is their number (default: WORKERS from the environment, else the profile's, or all that are at the address). Raises `Error`
    for an unknown or faulty profile, a number that is none, and workers that do not appear in time, with the reason.
    """
    from ddp_common.launchers import LAUNCHERS, started_by
    from ddp_common.without_dask import Ranks

    name = profile or os.environ.get("CLUSTER") or started_by() or "local"
    if name in LAUNCHERS:
        if started_by() != name:
            raise Error(f"CLUSTER={name}: this process was not started by {name}. Use `make run TUTORIAL=… CLUSTER={name}`, which does so, or "
                        f"start the script with {name} yourself.")
        return Ranks()
    dask.config.set({"distributed.worker.daemon": False, "distributed.comm.timeouts.tcp": SILENCE_TIMEOUT})  # ranks are children of workers
    dask.config.update_defaults({"distributed": LEAN})
    wanted = workers if workers is not None else os.environ.get("WORKERS")
    profile = read_profile(name)
    if (earlier := _earlier_in_notebook(name, profile, wanted)) is not None:
        return earlier
    client = (_at_address if "://" in name else _started)(profile, wanted)
    client.cell, client.request = _cell(), (name, profile, wanted)
    try:
        _wait(client, client.expected)
        if name != "local":
            shipping.provide(client)
        client.register_plugin(Preload())
        if len(client.workers()) > client.expected and wanted:
            client.most = client.expected
    except BaseException:
        client.close()
        raise
    _open_clients.add(client)
    if client.jobs is None and client.cluster is not None and _is_watched() and importlib.util.find_spec("bokeh"):
        print(f"Dask's dashboard: {client.dashboard_link}", file=sys.stderr, flush=True)
    return client


def _is_watched():
    """Whether somebody sees what is said now: on a terminal, in a notebook of `make lab`; not where outputs are kept and compared."""
    return (os.environ.get("DDP_PROGRESS") or ("bar" if sys.stderr.isatty() else "off")) == "bar"


def _cell():
    """Of a notebook: (the cell that runs, this execution of it). None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    message = shell.kernel.get_parent("shell") if hasattr(shell, "kernel") else None
    if not message:
        return None
    return message.get("metadata", {}).get("cellId") or message["content"].get("code"), message["header"]["msg_id"]


def _earlier_in_notebook(*request):
    """The client that this cell of a notebook has made when it was run before, if it is still open and the request the same.

    With another request that cluster is closed, unless a launch runs there. Of other open clusters in the notebook one line says
    that they are there: they need the same cores. Nothing of this in a program that is no notebook.
    """
    cell = _cell()
    if cell is None:
        return None
    for client in list(_open_clients):
        if client.cluster is None or client.status != "running" or client.cell is None:
            continue
        again = client.cell[0] == cell[0] and client.cell[1] != cell[1]
        if again and client.request == request and len(client.workers()) >= client.expected:
            print(f"This cell has started its cluster before: going on with its {client.ranks} workers. For a new one, close() the client first.",
                  file=sys.stderr)
            return client
        if again and not client.__dict__.get("ddp_inboxes"):
            print(f"The cluster that this cell has started before ({len(client.workers())} workers) is closed first.", file=sys.stderr)
            client.close()
        elif client.cell[1] != cell[1]:
            print(f"Another cluster of this notebook is open ({len(client.workers())} workers, {client.request[0]}) and needs the same cores: "
                  "close() its client, or restart the kernel.", file=sys.stderr)
    return None


def _at_address(profile, wanted):
    address, count = profile["cluster"], 1 if wanted is None else number_of_workers(wanted)
    try:
        with _quiet(), ThreadPoolExecutor(1) as own_thread:  # a notebook's has a loop that runs
            own_thread.submit(asyncio.run, _shake_hands(address)).result()
            client = ClusterClient(address, timeout=ANSWER_TIMEOUT)
    except Exception as error:  # what does not speak Dask's protocol may look like anything
        raise Error(f"CLUSTER={address}: no Dask scheduler could be reached there: {_why_not(error)}. Is it running, is the port right (the dashboard's is "
                    "another), and does it speak TLS? For tls://, Dask's own settings name the credentials: DASK_DISTRIBUTED__COMM__TLS__CA_FILE, "
                    "…__TLS__CLIENT__CERT and …__TLS__CLIENT__KEY.") from None
    client.timeout, client.expected = profile["timeout"], count
    return client


def _why_not(error):
    """Of a failed connection, in a few words."""
    if isinstance(error, MemoryError):  # it took the first bytes for the length of a message
        return "what answers does not speak Dask's protocol"
    said = [str(each).partition("\n")[0].rpartition("Error: ")[2] for each in (error, error.__cause__) if str(each or "")]
    return f"{said[0]}{f' ({said[1]})' if said[1:] else ''}" if said else f"no answer within {ANSWER_TIMEOUT} s"


async def _shake_hands(address):
    """Raise an exception unless there is a Dask scheduler. A `Client` would wait for ever for a port that takes connections and says nothing."""
    greeting = connect_to(address, timeout=ANSWER_TIMEOUT, **Security().get_connection_args("client"))
    (await asyncio.wait_for(greeting, ANSWER_TIMEOUT + 1)).abort()


def _started(profile, wanted):
    """A client of the cluster that a profile describes, whose workers may be yet to come."""
    count = number_of_workers(wanted if wanted is not None else profile["workers"])
    jobs = cluster = client = None
    try:
        with interrupts_held():
            if batch.is_batch(profile):
                jobs = batch.Jobs(profile)
                cluster = jobs.cluster
            else:
                cluster = _make_cluster(profile, count)
            client = ClusterClient(cluster.scheduler_address, security=cluster.security)
            client.cluster, client.jobs, client.timeout, client.expected = cluster, jobs, profile["timeout"], count
        if jobs is not None:
            print(f"Job logs and credentials: {jobs.directory}\nDashboard, on {socket.gethostname()} only: {client.dashboard_link}", file=sys.stderr)
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
    said = str(cause) if isinstance(cause, (TypeError, ValueError, RuntimeError, OSError)) else f"{type(cause).__name__}: {cause}"
    return Error(f"{profile['cluster']} could not be started with the profile's options: {said.rstrip('.')}.").with_traceback(None)


@contextlib.contextmanager
def _quiet():
    """What failed is said once, by us."""
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


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
        if pressed:  # whatever became of the cluster: its workers have heard it too
            raise KeyboardInterrupt from None


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
    from ddp_common.launchers import LAUNCHERS
    from ddp_common.without_dask import command

    if name in LAUNCHERS:
        return f"# No Dask: {name} starts the ranks.\n" + " ".join(command(name, tutorial, number_of_workers(workers or "auto"), restarts=0))
    if "://" in name:
        return f"Nothing would be started: there is a scheduler at {name}."
    profile = read_profile(name)
    count = number_of_workers(workers or profile["workers"])
    if batch.is_batch(profile):
        processes = batch.processes_in_a_job(profile)
        return f"# {-(-count // processes)} job(s) such as this one, for {count} rank(s):\n{batch.job_script(profile)}"
    cls, options = _class_and_options(profile, count)
    arguments = ", ".join(f"{key}={value!r}" for key, value in {"n_workers": count, **options}.items())
    return f"# No jobs: the cluster is one call.\n{cls}({arguments})"


def _wait(client, count, at_least=None):
    """Until `count` workers are there; or, once the time is over, `at_least` so many. Says what the queue says whenever it changes."""
    began, looked, said = time.monotonic(), 0.0, None
    while (there := len(client.workers())) < count:
        now = time.monotonic()
        if client.jobs is not None and now - looked > min(batch.LONGEST_INTERVAL, max(batch.LOOK_INTERVAL, (now - began) / 10)):
            states, looked = _look_at_jobs(client), now
            line = f"Waiting for workers: {there} of {count}. Jobs: {batch.summary(states)}"
            if line != said:
                print(line, file=sys.stderr, flush=True)
            said = line
        if now - began > client.timeout:
            if at_least and there >= at_least:
                print(f"Going on with {there} of {count} workers: the others did not come within {client.timeout:g} s.", file=sys.stderr)
                return
            raise Error(_too_late(client, there, count))
        time.sleep(0.05)
    if client.jobs is not None:
        client.jobs.note_arrivals(client.workers())


def _look_at_jobs(client):
    """The jobs' states. Those that have ended are submitted anew if their workers had been there, else it is an `Error`."""
    client.jobs.note_arrivals(client.workers())
    states = client.jobs.states() or {}
    over = ended(states)
    for job, reason in over.items():
        if job not in client.jobs.arrived:
            raise Error(f"Job {client.cluster.workers[job].job_id} ended before its worker came ({reason}).\n{client.jobs.log(job)}\nSet right what it "
                        "says; DRY=1 prints the job script, `make doctor` checks the usual causes.")
    if over:
        client.replace(over)
        client.jobs.submit(client.expected)
    return states


def ended(states):
    """Of the jobs in `states` (None: the queue does not answer) those that are over: name -> why."""
    return {job: reason for job, (kind, reason) in (states or {}).items() if kind == batch.ENDED}


def _too_late(client, there, count):
    message = f"{there} of {count} workers came within {client.timeout:g} s."
    if client.jobs is None:
        missing = "Look at the workers' log" if client.cluster is not None else f"Start them with `dask worker {client.scheduler.address}`"
        fewer = f", or ask for fewer: WORKERS={there}" if there else ""
        return f"{message} {missing}, wait longer (OPTIONS=\"timeout=3600\"){fewer}."
    states = client.jobs.states()
    queue = batch.summary(states) if states is not None else "nothing, it does not answer"
    logs = "\n".join(client.jobs.log(job) for job, (kind, _) in (states or {}).items() if kind == batch.RUNNING and job not in client.jobs.arrived)
    return (f"{message} {client.jobs.system.name} says of the jobs: {queue}. They were cancelled.\n" + (f"{logs}\n" if logs else "")
            + f"Wait longer (OPTIONS=\"timeout=3600\"), ask for fewer (WORKERS={max(there, 1)}) or for another queue (OPTIONS=\"queue=…\").")
