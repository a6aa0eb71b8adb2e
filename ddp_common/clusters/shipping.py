"""Workers and a scheduler that cannot import `ddp_common` get it from the client, as a zip.

Needed wherever the client's files are not theirs: Saturn Cloud, Kubernetes, hosts without a shared
file system. What runs there (`install`, `installed`, `Package`) travels by value, so it must use
nothing but the standard library and `distributed`. Promises: afterwards every worker, also one
that comes later or is restarted, imports the client's own source; a worker that cannot train (no
torch, another Python, another `ddp_common`) is named.
"""

import hashlib
import importlib.util
import io
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import cloudpickle
from distributed import Client, WorkerPlugin

from ddp_common.errors import Error

MUST_AGREE = ("python", "ddp_common")


def provide(client: Client) -> dict[str, dict]:
    """Have the scheduler and all workers of `client` import this `ddp_common`.

    Returns what `installed` says on each worker, by its address. Raises `Error` if a worker has
    no torch, or another Python or `ddp_common`.
    """
    archive, digest = pack()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        client.run_on_scheduler(install, archive, digest)
        client.register_plugin(Package(archive, digest))
        versions = client.run(installed)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    here = {**installed(), "ddp_common": digest}
    for address, there in versions.items():
        _check_versions(address, there, here)
    return versions


def _check_versions(address, there, here):
    if there["torch"] is None:
        raise Error(
            f"The worker at {address} cannot import torch. Ranks are started by workers: "
            "install there what pyproject.toml lists, in the versions of constraints.txt, "
            "or point the profile's 'python' to an environment that has it."
        )
    different = []
    for name in MUST_AGREE:
        if there[name] != here[name]:
            different.append(f"{name} {there[name]} instead of {here[name]}")
    if different:
        raise Error(
            f"The worker at {address} has {', '.join(different)}. "
            "Functions travel between client and workers, so both need the same: "
            "use one environment for both, or install the same versions. "
            "`make doctor` compares all of them."
        )


def pack() -> tuple[bytes, str]:
    """(zip of this package's source, digest of the source).

    The same source gives the same bytes.
    """
    source = Path(__file__).parents[1]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in modules_of(source):
            name = path.relative_to(source.parent).as_posix()
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue(), digest_of(source)


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
    else:  # in the zip of `install`
        versions["ddp_common"] = folder.parent.stem.removeprefix("ddp_common-")
    return versions


def install(archive: bytes, digest: str) -> None:
    """Put the zip on the path of this process and of all that it starts.

    Nothing happens where there is a `ddp_common` already.
    """
    if importlib.util.find_spec("ddp_common") is not None:
        return
    path = Path(tempfile.mkdtemp(prefix="ddp-")) / f"ddp_common-{digest}.zip"
    path.write_bytes(archive)
    sys.path.insert(0, str(path))
    folders = [str(path)]
    if os.environ.get("PYTHONPATH"):
        folders.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)  # for the fork server
    importlib.invalidate_caches()


class Package(WorkerPlugin):
    """Worker plugin: `install`, before any plugin that is of `ddp_common` itself."""

    name = "ddp-package"

    def __init__(self, archive: bytes, digest: str):
        self.archive = archive
        self.digest = digest

    def setup(self, worker):
        install(self.archive, self.digest)
