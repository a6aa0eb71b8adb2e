"""Several hosts on this machine, each with an address and a name, and a switch between them.

    with running_hosts(3) as (one, two, three): two.run("ping", "-c1", one.name)

Needs root and iproute2 (Debian, Ubuntu). A host is a network namespace. The hosts share files,
processors and memory; they reach each other through the switch, and nothing else. A host's own
name leads to 127.0.1.1 there, as Debian has it. The switch is a namespace too: this machine's own
network sees none of it, so that addresses cannot clash. Promises: at the end namespaces, links and
every process in them are gone.
"""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from patience import PATIENCE

PROGRAMS = ("ip", "bridge", "unshare", "sh")
INTERFACE = "link0"
NAMESPACES = Path("/run/netns")
NAMES_OF_HOSTS = Path("/etc/netns")  # where `ip netns exec` looks for a namespace's own /etc/hosts

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
        with running_hosts(count=1) as (host,):
            assert host.run("hostname").strip() == host.name
            host.cut()
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return f"network namespaces cannot be made here: {said}"


@dataclass
class Host:
    """A host: its name, its address, and the name of the one interface that has this address."""

    name: str
    address: str
    interface: str
    namespace: str
    switch: str
    port: str  # of the switch: the other end of the host's cable
    processes: list = field(default_factory=list)

    def start(self, command, **options):
        """`subprocess.Popen` of a command on this host. Its process number is the command's."""
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        process = subprocess.Popen([*inside, *named, *map(str, command)], **options)
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
        _ip(*f"netns exec {self.switch} bridge link set dev {self.port} state 0".split())


@contextlib.contextmanager
def running_hosts(count=3):
    """Make `count` hosts on one switch; yields a list of `Host`: host-1, host-2 and so on."""
    common = f"ddp-{os.getpid()}-{next(_numbers)}"
    switch = f"{common}-switch"
    hosts = []
    for number in range(1, count + 1):
        name = f"host-{number}"
        address = f"10.77.0.{number}"
        namespace = f"{common}-{name}"
        hosts.append(Host(name, address, INTERFACE, namespace, switch, f"port{number}"))
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in hosts:
            _connect(host)
            _name(host, hosts)
        yield hosts
    finally:
        _remove([*(host.namespace for host in hosts), switch])
        for host in hosts:
            for process in host.processes:
                process.wait(PATIENCE)


def _connect(host):
    _ip("netns", "add", host.namespace)
    inside = f"peer name {host.interface} netns {host.namespace}"
    _ip(*f"-n {host.switch} link add {host.port} type veth {inside}".split())
    _ip("-n", host.switch, "link", "set", host.port, "master", "switch", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
    for interface in ("lo", host.interface):
        _ip("-n", host.namespace, "link", "set", interface, "up")


def _name(host, hosts):
    lines = [
        "127.0.0.1 localhost",
        f"127.0.1.1 {host.name}",
        *(f"{other.address} {other.name}" for other in hosts if other is not host),
    ]
    folder = NAMES_OF_HOSTS / host.namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _remove(namespaces):
    """Kill every process in these namespaces, wait until they are gone, and remove all there is.

    Also the processes whose parent has left.
    """
    there = [namespace for namespace in namespaces if (NAMESPACES / namespace).exists()]
    deadline = time.monotonic() + PATIENCE
    pids = _pids_in(there)
    while pids and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        pids = _pids_in(there)
    for namespace in namespaces:
        # its links go with it
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        shutil.rmtree(NAMES_OF_HOSTS / namespace, ignore_errors=True)


def _pids_in(namespaces):
    said = [_ip("netns", "pids", namespace) for namespace in namespaces]
    return [int(pid) for pids in said for pid in pids.split()]


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
