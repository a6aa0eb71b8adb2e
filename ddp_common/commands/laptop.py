"""Whether this machine is ready for a class: `make check`, one line for each thing.

What an instructor wants to know of thirty laptops the day before: packages, room, the data of the
tutorials, a notebook's kernel, a cluster of two workers, and two ranks that train. Promises: it
downloads nothing, leaves nothing behind but pictures that the repository draws anyway, and says
with each failure what to do.
"""

import importlib.metadata
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
from dask.system import CPU_COUNT

from ddp_common.clusters.checks import FAILED, WARNING, Finding
from ddp_common.clusters.connect import connect
from ddp_common.clusters.doctor import conclude, guarded, tell
from ddp_common.data.datasets import fetch, registry

ROOT = Path(__file__).parents[2]
CORES = 2
MEMORY = 4.0  # GiB that should be free: two workers, two ranks, a browser
ROOM = 1.0  # GiB on the disk, for runs
GIB = 2**30
KERNEL_TIMEOUT = 60  # seconds
SAMPLES, BATCH = 64, 16
TRAINED = "The two ranks' own message comes first. A firewall or VPN may stand between them."


class Check(NamedTuple):
    """One thing to look at."""

    title: str
    run: Callable[[], Iterator[Finding]]
    if_impossible: str  # what to do if it fails in a way of its own


def check_packages() -> Iterator[Finding]:
    """Whether every package that is needed is there, in the version that was tested."""
    tested = _tested_versions()
    missing, others = [], []
    for name in _needed():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        # A build for another CUDA version calls itself 2.13.0+cu130.
        if version.partition("+")[0] != tested.get(name, version):
            others.append(f"{name} {version} (tested: {tested[name]})")
    advice = "`make setup` installs them, with the network or from a folder of wheels."
    if missing:
        yield Finding("packages", f"missing: {', '.join(missing)}", FAILED, advice)
    elif others:
        yield Finding("packages", ", ".join(others), WARNING, advice)
    else:
        python = platform.python_version()
        yield Finding("packages", f"Python {python}, {len(_needed())} packages as tested")


def _needed():
    """The names of the packages that this one asks for, those of the notebooks among them."""
    wanted = importlib.metadata.requires("ddp-common") or []
    names = []
    for requirement in wanted:
        name, _, condition = requirement.partition(";")
        if "extra ==" in condition and "dev" not in condition:
            continue
        names.append(re.split(r"[<>=!~ \[]", name.strip())[0])
    return sorted(set(map(_normal, names)))


def _tested_versions():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.partition("==") for line in lines if "==" in line]
    return {_normal(name): version.strip() for name, _, version in pairs}


def _normal(name):
    """A package's name as packaging's specifications write it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def check_machine() -> Iterator[Finding]:
    """Cores, memory that is free, room on the disk."""
    memory = psutil.virtual_memory().available / GIB
    room = shutil.disk_usage(ROOT).free / GIB
    found = f"{CPU_COUNT} cores, {memory:.1f} GiB of memory free, {room:.0f} GiB of disk free"
    if room < ROOM:
        yield Finding("machine", found, FAILED, "Make room on the disk: runs need some.")
    elif memory < MEMORY:
        advice = "Close programs: with little memory, workers are slow or are ended."
        yield Finding("machine", found, WARNING, advice)
    elif CPU_COUNT < CORES:
        advice = "Everything works on one core, but two ranks take turns: it is slow."
        yield Finding("machine", found, WARNING, advice)
    else:
        yield Finding("machine", found)


def check_data() -> Iterator[Finding]:
    """The data of every tutorial; what is drawn is drawn now, so that the class need not wait."""
    began = time.monotonic()
    titles = [f"{name} ({fetch(name).origin})" for name in registry()]
    yield Finding("data", f"{', '.join(titles)}; {time.monotonic() - began:.1f} s")


def check_notebook() -> Iterator[Finding]:
    """Whether a kernel starts, computes and finds the package."""
    import nbformat
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient

    cell = nbformat.v4.new_code_cell("import ddp_common, sys\nprint(sys.prefix)")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    kernel = KernelManager(kernel_name="python3", transport="ipc")  # through no port
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kernel.connection_file = f"{folder}/kernel.json"
        try:
            NotebookClient(notebook, timeout=KERNEL_TIMEOUT, km=kernel).execute()
        finally:
            kernel.shutdown_kernel(now=True)
    prefix = notebook.cells[0].outputs[0].text.strip()
    if Path(prefix).resolve() != Path(sys.prefix).resolve():
        advice = "Start notebooks with `make lab`, or choose the kernel of this environment."
        yield Finding("notebook", f"the kernel runs in {prefix}", FAILED, advice)
        return
    yield Finding("notebook", f"a kernel answers within {time.monotonic() - began:.1f} s")


def check_ranks() -> Iterator[Finding]:
    """A local cluster of two, and two ranks on it that train."""
    from ddp_common.client.launch import launch

    began = time.monotonic()
    with connect("local", 2) as client, tempfile.TemporaryDirectory() as folder:
        came = time.monotonic() - began
        yield Finding("cluster", f"two workers came within {came:.1f} s")
        run = launch(client, train_a_little, directory=f"{folder}/run")
        seconds = time.monotonic() - began
        yield Finding(
            "training", f"two ranks trained over {run.result}, {seconds:.1f} s after the start"
        )


def train_a_little() -> str:
    """On a rank: some steps of a linear model; returns the backend."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from ddp_common.ranks.rendezvous import device
    from ddp_common.ranks.sampling import ElasticSampler

    inputs = torch.arange(float(SAMPLES))[:, None] / SAMPLES
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ElasticSampler(SAMPLES, BATCH)
    for batch in sampler:
        rows = inputs[batch].to(device())
        loss = (model(rows) - rows).square().mean() * sampler.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.distributed.get_backend()


CHECKS = [
    Check("packages", check_packages, "Run `make setup` again."),
    Check("machine", check_machine, "Look at the disk with `df -h`."),
    Check("data", check_data, "Restore the repository's own files: `git checkout data`."),
    Check("notebook", check_notebook, "Run `make setup` again, and start it with `make lab`."),
    Check("cluster", check_ranks, TRAINED),
]


def check(say: Callable[[str], None] = print) -> bool:
    """Look at everything. `say` gets a line for each thing, then advice and a verdict.

    Returns whether nothing has failed.
    """
    findings = []
    for each in CHECKS:
        for finding in guarded(each.title, each.if_impossible, each.run):
            findings.append(finding)
            tell(finding, say)
    return conclude(findings, say, ready="Ready", not_ready="Not ready")
