"""Files from the network that can be trusted: verified, and unpacked without surprises.

pooch downloads them, compares their digests, and leaves nothing of one that is not right. When
one address fails, the next is tried. Promises: what comes out of an archive lies in its folder and
is a plain file; after a failure nothing is left.
"""

import contextlib
import errno
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

import pooch
import requests
from filelock import FileLock

from ddp_common.errors import Error, first_line

pooch.get_logger().setLevel("WARNING")  # the progress bar says what is downloaded

TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 16  # bytes

# What unpacking raises for a damaged archive, or for one that `_check` or tarfile refuses.
# RuntimeError: it is encrypted, or packed by an unknown method.
REFUSED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    EOFError,
    ValueError,
    RuntimeError,
)


@contextlib.contextmanager
def only_one(folder: Path):
    """Make `folder`, and let one program at a time work on it; the others wait.

    An OSError in the body becomes an `Error`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "Make room there."
        else:
            remedy = "Work in a copy of the repository that is yours to write to."
        raise Error(
            f"{folder} cannot be written: {error.strerror or error}. "
            f"Nothing half-written was left. {remedy}"
        ) from None


def retrieve(file: dict, folder: Path, progressbar: bool = True) -> Path:
    """Download `file`, an entry of the registry (url, name, sha256, mirrors, unpack), to `folder`.

    A mirror is a dict with a url, and with a digest (sha256 or md5) where its copy is another.
    Returns the path of the file, or that of the folder that an archive was unpacked into. Raises
    `Error`, which says of each address why it was no use; OSError when the disk does not take it.
    """
    downloader = pooch.HTTPDownloader(
        progressbar=progressbar,
        chunk_size=CHUNK,
        timeout=TIMEOUT,
        headers={"Accept-Encoding": "identity"},  # else requests would unpack a .gz
    )
    failures = []
    for source in (file, *file.get("mirrors", ())):
        if "md5" in source:
            digest = f"md5:{source['md5']}"
        else:
            digest = source.get("sha256", file["sha256"])  # None: a live list, which has none
        try:
            path = pooch.retrieve(
                source["url"],
                known_hash=digest,
                fname=file["name"],
                path=folder,
                downloader=downloader,
                processor=unpack if file.get("unpack") else None,
            )
            return Path(path)
        except (requests.RequestException, ValueError) as error:  # ValueError: another digest
            failures.append(f"{source['url']}: {_innermost(error)}")
    sentences = " ".join(failure.rstrip(".") + "." for failure in failures)
    raise Error(
        f"Downloading {file['name']} failed. {sentences} Nothing was changed. "
        "Check the network (a proxy? HTTPS_PROXY) and run the command again. "
        "data=shipped needs no download."
    )


def _innermost(error):
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return error


def unpack(archive: str, action: str = "download", pooch: object = None) -> str:
    """Unpack a zip or tar into the new folder beside it that has its name without the suffix.

    A processor of pooch, which gives the other arguments. Returns the folder. Raises `Error` for a
    damaged archive, and for one with a member that would lie outside, a link or a device; OSError
    for a full disk. What was unpacked until then is left, so unpack in a temporary folder.
    """
    folder = Path(archive).with_suffix("")
    try:
        if archive.endswith(".zip"):
            _unpack_zip(archive, folder)
        else:
            _unpack_tar(archive, folder)
    except OSError as error:
        if error.errno:
            raise
        _refuse(archive, error)  # no gzip
    except REFUSED as error:
        _refuse(archive, error)
    return str(folder)


def _unpack_zip(archive, folder):
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            _check(member.filename, kind in (0, stat.S_IFREG, stat.S_IFDIR))
        file.extractall(folder)


def _unpack_tar(archive, folder):
    with tarfile.open(archive) as file:
        for member in file:
            _check(member.name, member.isfile() or member.isdir())
        # Python has it from 3.11.4 on: it takes away bits such as setuid
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(folder)


def _check(name, is_plain):
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"its member {name!r} would lie outside of the folder")
    if not is_plain:
        raise ValueError(f"its member {name!r} is a link or a device, not a plain file")


def _refuse(archive, error):
    raise Error(
        f"{Path(archive).name} is not unpacked: {first_line(error)}. Nothing was changed. "
        "It is not the archive that is expected; do not use it."
    ) from None
