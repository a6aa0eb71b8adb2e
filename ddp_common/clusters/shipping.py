"""Workers and a scheduler that cannot import `ddp_common` get it from the client, as a zip.

Needed wherever the client's files are not theirs: Saturn Cloud, Kubernetes, hosts without a shared
file system. What runs there (`install`, `installed`, `Package`) travels by value, so it must use
nothing but the standard library and `distributed`. Dask's own `upload_file` would do but for a
worker that comes later: it unpickles our other plugins while the file is still being written.
Promises: afterwards every worker, also one that comes later or is restarted, imports the client's
own source; a worker that cannot train (no torch, another Python, another `ddp_common`) is named.
"""

import hashlib
import importlib.util
import io
import sys
import zipfile
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client, WorkerPlugin

from ddp_common.errors import Error

NAME = "ddp_common-"  # of the zip, before the digest of what is in it


def provide(client: Client) -> None:
    """Have the scheduler and all workers of `client` import this `ddp_common`.

    Raises `Error` if a worker has no torch, or another Python or `ddp_common`.
    """
    here = installed()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        scheduler, workers = client.run_on_scheduler(installed), client.run(installed)
        for address, there in workers.items():
            _check_versions(address, there, here)
        package = Package(pack(), f"{NAME}{here['ddp_common']}.zip")
        if scheduler["ddp_common"] is None:
            client.run_on_scheduler(package.setup_on_scheduler)
        client.register_plugin(package)  # also for workers that come later
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def _check_versions(address: str, there: dict, here: dict) -> None:
    if there["torch"] is None:
        raise Error(
            f"The worker at {address} cannot import torch. Ranks are started by workers: "
            "install there what pyproject.toml lists, in the versions of constraints.txt, "
            "or point the profile's 'python' to an environment that has it."
        )
    different = []
    for name in ("python", "ddp_common"):
        if there[name] not in (here[name], None):
            different.append(f"{name} {there[name]} instead of {here[name]}")
    if different:
        raise Error(
            f"The worker at {address} has {', '.join(different)}. "
            "Functions travel between client and workers, so both need the same: "
            "use one environment for both, or install the same versions. "
            "`make doctor` compares all of them."
        )


def pack() -> bytes:
    """A zip of this package's source."""
    source = Path(__file__).parents[1]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in modules_of(source):
            archive.write(path, path.relative_to(source.parent))
    return buffer.getvalue()


class Package(WorkerPlugin):
    """Worker plugin: `install`, before any plugin that is of `ddp_common` itself."""

    name = "ddp-package"

    def __init__(self, archive: bytes, file_name: str):
        self.archive = archive
        self.file_name = file_name

    def setup(self, worker: Any) -> None:
        install(Path(worker.local_directory, self.file_name), self.archive)

    def setup_on_scheduler(self, dask_scheduler: Any) -> None:
        install(Path(dask_scheduler.local_directory, self.file_name), self.archive)


def install(path: Path, archive: bytes) -> None:
    """Put the zip, as the file `path`, where this process looks for modules.

    Nothing happens where there is a `ddp_common` already.
    """
    if importlib.util.find_spec("ddp_common") is not None:
        return
    path.write_bytes(archive)
    sys.path.insert(0, str(path))
    importlib.invalidate_caches()


def modules_of(source: Path) -> list[Path]:
    """The files of a package's modules, those of its subpackages among them, sorted."""
    return sorted(source.rglob("*.py"))


def digest_of(source: Path) -> str:
    """SHA-256 of the names and contents of a package's modules, its first 16 digits."""
    digest = hashlib.sha256()
    for path in modules_of(source):
        name = path.relative_to(source).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def installed() -> dict[str, str | None]:
    """What this process would import.

    The versions of python (major.minor), torch and distributed, and the digest of ddp_common's
    source. None: absent.
    """
    import importlib.metadata  # on a worker nobody may have imported it

    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "ddp_common": None}
    for name in ("torch", "distributed"):
        is_there = importlib.util.find_spec(name) is not None
        versions[name] = importlib.metadata.version(name) if is_there else None
    found = importlib.util.find_spec("ddp_common")
    if found is None:
        return versions
    assert found.origin is not None, "a folder with the name of this package hides it"
    folder = Path(found.origin).parent
    if folder.is_dir():
        versions["ddp_common"] = digest_of(folder)
    else:  # in the zip of `provide`
        versions["ddp_common"] = folder.parent.stem.removeprefix(NAME)
    return versions
