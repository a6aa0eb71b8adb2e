"""Workers and a scheduler that cannot import `ddp_common` get it from the client, as a zip that they verify.

Needed wherever the client's files are not theirs: Saturn Cloud, Kubernetes, hosts without a shared file system. The functions of this
module travel by value, so it must use nothing but the standard library and `distributed`. Promises: afterwards every worker, also one that
comes later or is restarted, imports the client's own source; a worker that cannot train (no torch, another Python, another
`ddp_common`) is named.
"""

import hashlib
import importlib.util
import io
import os
import sys
import tempfile
import zipfile
from pathlib import Path

from distributed import WorkerPlugin

MUST_AGREE = ("python", "ddp_common")


def provide(client):
    """Have the scheduler and all workers of `client` import this `ddp_common`; returns address -> versions. Raises `Error`."""
    import cloudpickle

    from ddp_common.errors import Error

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
        if there["torch"] is None:
            raise Error(
                f"The worker at {address} cannot import torch. Ranks are started by workers: install there what pyproject.toml lists, in "
                "the versions of constraints.txt, or point the profile's 'python' to an environment that has it."
            )
        if different := [
            f"{name} {there[name]} instead of {here[name]}"
            for name in MUST_AGREE
            if there[name] != here[name]
        ]:
            raise Error(
                f"The worker at {address} has {', '.join(different)}. Functions travel between client and workers, so both need the same: "
                "use one environment for both, or install the same versions. `make doctor` compares all of them."
            )
    return versions


def pack():
    """(zip of this package's source, digest of the source). The same source gives the same bytes."""
    source = Path(__file__).parents[1]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in modules_of(source):
            name = path.relative_to(source.parent).as_posix()
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue(), digest_of(source)


def modules_of(source):
    """The files of a package's modules, those of its subpackages among them, sorted."""
    return sorted(source.rglob("*.py"))


def digest_of(source):
    """SHA-256 of the names and contents of a package's modules, its first 16 digits."""
    digest = hashlib.sha256()
    for path in modules_of(source):
        name = path.relative_to(source).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def installed():
    """What this process would import: versions of python (major.minor), torch, distributed; the digest of ddp_common's source. None: absent."""
    import importlib.metadata

    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "ddp_common": None}
    for name in ("torch", "distributed"):
        versions[name] = (
            importlib.metadata.version(name) if importlib.util.find_spec(name) else None
        )
    if (found := importlib.util.find_spec("ddp_common")) is not None:
        place = Path(found.origin).parent
        versions["ddp_common"] = (
            digest_of(place) if place.is_dir() else place.parent.stem.removeprefix("ddp_common-")
        )
    return versions


def install(archive, digest):
    """Put the zip on the path of this process and of all that it starts, unless it has a `ddp_common` of its own."""
    if importlib.util.find_spec("ddp_common") is not None:
        return
    path = Path(tempfile.mkdtemp(prefix="ddp-")) / f"ddp_common-{digest}.zip"
    path.write_bytes(archive)
    sys.path.insert(0, str(path))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(path), os.environ.get("PYTHONPATH")])
    )  # for the forkserver
    importlib.invalidate_caches()


class Package(WorkerPlugin):
    """Worker plugin: `install`, before any plugin that is of `ddp_common` itself."""

    name = "ddp-package"

    def __init__(self, archive, digest):
        self.archive, self.digest = archive, digest

    def setup(self, worker):
        install(self.archive, self.digest)
