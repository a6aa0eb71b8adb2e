"""Several hosts on this machine, each with an address and a name, and a switch between them.

    with running_hosts("one", "two") as (one, two): two.run("ping", "-c1", one.name)

Needs root and iproute2 (Debian, Ubuntu). A host is a network namespace. The hosts share files,
processors and memory; they reach each other through the switch, and nothing else. A host's own
name leads to 127.0.1.1 there, as Debian has it. The switch is a namespace too: this machine's own
network sees none of it, so that addresses cannot clash.
Promises: at the end namespaces, links and every process in them are gone.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from patience import PATIENCE

PROGRAMS = ("ip", "bridge", "nsenter", "unshare", "sh", "hostname", "mount")
INTERFACE, SECOND = "link0", "link1"
NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000  # of setns(2)
# Not `ip netns exec`: it mounts /sys anew, without the control groups that slurmd looks for
NAMED = '{hostname} "$0" && {mount} --bind "$1" /etc/hosts && shift && exec "$@"'

_numbers = itertools.count()


@functools.cache
def why_not():
    """Why no hosts can be made here; None if they can. Finds out by making one."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt install iproute2 util-linux)"
    try:
        with running_hosts("host") as (host,):
            assert host.run("hostname").strip() == host.name
            host.cut()
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return f"network namespaces cannot be made here: {said}"


@dataclass
class Host:
    """A host: its name, its address, and the name of the interface that has this address.

    A second network is there too, with an address and an interface (`SECOND`) of its own.
    """

    name: str
    address: str
    second_address: str
    namespace: str
    switch: str
    ports: tuple[str, str]  # of the switch: the other ends of the host's cables
    names: Path  # its /etc/hosts
    interface: str = INTERFACE
    processes: list = field(default_factory=list)

    def start(self, command, **options):
        """`subprocess.Popen` of a command on this host. Its process number is the command's."""
        at = {name: shutil.which(name) for name in PROGRAMS}  # the command may have another PATH
        inside = [at["nsenter"], f"--net={NAMESPACES / self.namespace}"]
        apart = [at["unshare"], "--uts", "--mount"]
        named = [at["sh"], "-c", NAMED.format(**at), self.name, str(self.names)]
        process = subprocess.Popen([*inside, *apart, *named, *map(str, command)], **options)
        self.processes.append(process)
        return process

    def run(self, *command):
        """What a command prints. Raises `CalledProcessError` if it fails."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, error = process.communicate(timeout=PATIENCE)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, out, error)
        return out

    def cut(self):
        """Have the switch drop what the host sends and gets. The link still looks sound."""
        self._forward(0)

    def mend(self):
        """Have the switch forward it again."""
        self._forward(3)

    def _forward(self, state):
        for port in self.ports:
            _ip(*f"netns exec {self.switch} bridge link set dev {port} state {state}".split())

    def pids(self):
        """The numbers of all processes on this host."""
        return _pids_in([self.namespace])

    def peers_of(self, pid):
        """The addresses at both ends of a process's connections."""
        lines = self.run("ss", "-Htnp").splitlines()
        ends = [end for line in lines if f"pid={pid}," in line for end in line.split()[3:5]]
        return {end.rpartition(":")[0].strip("[]").removeprefix("::ffff:") for end in ends}

    def kill(self):
        """Kill all processes on this host, as if its power was cut."""
        _kill_all_in([self.namespace])

    @contextlib.contextmanager
    def network(self):
        """Meanwhile this thread, and those that it starts, are in the network of this host."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        with open("/proc/thread-self/ns/net") as before:
            with open(NAMESPACES / self.namespace) as there:
                assert setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert setns(before.fileno(), CLONE_NEWNET) == 0


@contextlib.contextmanager
def running_hosts(*names, has_default_route=False):
    """Make hosts of these names on one switch; yields a list of `Host`.

    Without a default route Dask takes a host's own name for its address.
    """
    common = f"ddp-{os.getpid()}-{next(_numbers)}"
    switch = f"{common}-switch"
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    hosts = [
        Host(
            name,
            address=f"10.77.0.{number}",
            second_address=f"10.78.0.{number}",
            namespace=f"{common}-{name}",
            switch=switch,
            ports=(f"port{number}", f"second{number}"),
            names=folder / name,
        )
        for number, name in enumerate(names, start=1)
    ]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in hosts:
            _connect(host)
            _name(host, hosts)
            if has_default_route:
                _ip("-n", host.namespace, "route", "add", "default", "dev", host.interface)
        yield hosts
    finally:
        _remove([*(host.namespace for host in hosts), switch])
        for host in hosts:
            for process in host.processes:
                process.wait(PATIENCE)
        shutil.rmtree(folder)


def _connect(host):
    _ip("netns", "add", host.namespace)
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    for port, interface, address in zip(
        host.ports, (host.interface, SECOND), (host.address, host.second_address)
    ):
        inside = f"peer name {interface} netns {host.namespace}"
        _ip(*f"-n {host.switch} link add {port} type veth {inside}".split())
        _ip("-n", host.switch, "link", "set", port, "master", "switch", "up")
        _ip("-n", host.namespace, "address", "add", f"{address}/24", "dev", interface)
        _ip("-n", host.namespace, "link", "set", interface, "up")


def _name(host, hosts):
    lines = [
        "127.0.0.1 localhost",
        f"127.0.1.1 {host.name}",
        *(f"{other.address} {other.name}" for other in hosts if other is not host),
    ]
    host.names.write_text("\n".join(lines) + "\n")


def _remove(namespaces):
    """Kill every process in these namespaces, wait until they are gone, and remove all there is.

    Also the processes whose parent has left.
    """
    _kill_all_in([namespace for namespace in namespaces if (NAMESPACES / namespace).exists()])
    for namespace in namespaces:
        # its links go with it
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _kill_all_in(namespaces):
    deadline = time.monotonic() + PATIENCE
    pids = _pids_in(namespaces)
    while pids and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        pids = _pids_in(namespaces)


def _pids_in(namespaces):
    said = [_ip("netns", "pids", namespace) for namespace in namespaces]
    return [int(pid) for pids in said for pid in pids.split()]


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
