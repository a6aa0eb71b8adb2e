"""Files from the network that can be trusted: resumed, verified, and unpacked without surprises.

When one address fails, the next is tried. A file is written under the name of its digest
(`.images.tar-a443fc2f.part`) and gets its own when all of it has come and the digest fits. A
download that broke off is resumed, also by the next program. Relies on pooch for the digests.
Promises: what has its name is whole; what comes out of an archive lies in its folder and is a
plain file; after a failure nothing is left but a part that can be resumed.
"""

import contextlib
import errno
import functools
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pooch
import requests
from tqdm import tqdm

from ddp_common.errors import Error, first_line

pooch.get_logger().setLevel("WARNING")  # the progress bar says what is downloaded

ATTEMPTS = 5  # at one address, as long as something comes
PAUSE = 1.0  # seconds, times the number of attempts so far
TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 14  # bytes; what came of a chunk is lost when the connection breaks in it

# What unpacking a damaged archive raises. RuntimeError: it is encrypted, or packed by an unknown
# method.
DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    EOFError,
    ValueError,
    RuntimeError,
)


@contextlib.contextmanager
def only_one(folder: Path, wait: bool = False):
    """Make `folder`, and let one program at a time work on it.

    The others wait, or raise `Error`. An OSError in the body becomes an `Error`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / f".{folder.name}.lock", "w") as lock:
            _lock(lock, folder, wait)
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


def _lock(file, folder, wait):
    try:
        import fcntl  # not on every system

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Error(
            f"Another program is downloading to {folder} at this moment. Wait until it is done."
        ) from None
    except (ImportError, OSError):  # a system without such locks
        return  # two programs at once waste time there, but what they leave is whole all the same


def retrieve(file: dict, folder: Path, parts: Path, progressbar: bool = True) -> Path:
    """Download `file`, an entry of the registry (url, name, sha256, size, mirrors), to `folder`.

    A mirror is a dict with a url, and with a digest (sha256 or md5) where its copy is another.
    What breaks off stays in the folder `parts`. Returns the path. Raises `Error`, which says of
    each address why it was no use; OSError when the disk does not take it.
    """
    failures = []
    mirrors = [{"sha256": file["sha256"], **mirror} for mirror in file.get("mirrors", ())]
    sources = [file, *mirrors]
    while sources:
        source = sources.pop(0)
        digest = _digest_of(source)
        if digest:
            part = parts / f".{file['name']}-{digest.partition(':')[2][:8]}.part"
        else:
            part = folder / f".{file['name']}.part"
        begun_earlier = part.exists()
        downloader = functools.partial(
            _download,
            part=part,
            size=source.get("size"),
            resumable=bool(digest),
            progressbar=progressbar,
        )
        try:
            path = pooch.retrieve(
                source["url"],
                known_hash=digest,
                fname=file["name"],
                path=folder,
                downloader=downloader,
            )
            return Path(path)
        except (requests.RequestException, ValueError) as error:
            # ValueError: the digest, or the length, differs.
            failures.append(f"{source['url']}: {_innermost(error)}")
            if begun_earlier and not part.exists():
                # What was there earlier was no beginning of it: try again from the start.
                sources.insert(0, source)
        except OSError:  # a full disk
            part.unlink(missing_ok=True)
            raise
    sentences = " ".join(failure.rstrip(".") + "." for failure in failures)
    raise Error(
        f"Downloading {file['name']} failed. {sentences} Nothing was changed. "
        "Check the network (a proxy? HTTPS_PROXY) and run the command again: "
        "it goes on where it broke off. data=shipped needs no download."
    )


def _digest_of(source):
    """The digest of a file as pooch takes it, None if there is none: it is a live list."""
    if "md5" in source:
        return f"md5:{source['md5']}"
    if source["sha256"]:
        return f"sha256:{source['sha256']}"
    return None


def _innermost(error):
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return error


def _download(url, output_file, _, *, part, size, resumable, progressbar):
    """What pooch calls to download.

    It goes into `part`, from where that ends, and again if the connection breaks; then the part
    becomes `output_file`.
    """
    for attempt in range(ATTEMPTS):
        begun = part.stat().st_size if resumable and part.exists() else 0
        try:
            _stream(url, part, begun, size, progressbar)
            break
        except requests.RequestException:
            received = part.stat().st_size if part.exists() else 0
            is_last = attempt == ATTEMPTS - 1
            if is_last or received <= begun:
                raise
            time.sleep(PAUSE * attempt)
    os.replace(part, output_file)


def _stream(url, part, begun, size, progressbar):
    """Append the bytes of `url` from `begun` on to `part`.

    All of them are written anew if the server knows no ranges.
    """
    headers = {"Accept-Encoding": "identity"}
    if begun:
        headers["Range"] = f"bytes={begun}-"
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
        if begun and response.status_code == requests.codes.requested_range_not_satisfiable:
            return  # all is here; the digest will tell
        response.raise_for_status()
        is_rest = response.status_code == requests.codes.partial_content
        announced = int(response.headers.get("Content-Length", 0))
        if is_rest:
            announced += begun
        with open(part, "ab" if is_rest else "wb") as file:
            bar = tqdm(
                total=size or announced or None,
                initial=file.tell(),
                desc=part.name[1:].rpartition("-")[0] or part.name,
                unit="B",
                unit_scale=True,
                disable=not progressbar,
            )
            with bar:
                for chunk in response.iter_content(CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
                    if size and file.tell() > size:
                        break
                received = file.tell()
    if size and received > size:
        part.unlink()
        raise ValueError(f"sends more than the {size:,} bytes that the file has")
    # With a Content-Length, requests has noticed an early end, and the digest will tell.
    if size and received < size and "Content-Length" not in response.headers:
        raise requests.ConnectionError(f"broke off after {received:,} of {size:,} bytes")


def unpack(archive: Path, folder: Path, progressbar: bool = True, *, bytes: int, files: int):
    """Unpack the zip or tar `archive` into the new folder `folder`; only plain files are written.

    The folder gets its name when it is whole; until then it lies beside `archive`. Raises `Error`,
    and leaves nothing, for a member that would lie outside, a link or device, more than `bytes` in
    all or more than `files`, and a damaged archive; OSError for a full disk.
    """

    def refuse(why):
        raise Error(
            f"{archive.name} is not unpacked: {why}. Nothing was changed. "
            "It is not the archive that is expected; do not use it."
        )

    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpacking-") as temporary:
        whole = Path(temporary, "whole")
        try:
            with contextlib.ExitStack() as opened:
                members = tqdm(
                    _members(archive, opened),
                    desc=f"unpacking {archive.name}",
                    unit=" files",
                    disable=not progressbar,
                )
                for count, member in enumerate(members, 1):
                    if _leads_outside(member.name):
                        refuse(f"its member {member.name!r} would lie outside of the folder")
                    if not member.is_plain:
                        refuse(
                            f"its member {member.name!r} is a link or a device, not a plain file"
                        )
                    bytes -= member.size
                    files -= 1
                    if bytes < 0 or files < 0:
                        refuse(
                            "it holds more than it should, "
                            f"at its member {count:,}, {member.name!r}"
                        )
                    target = Path(whole, member.name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with member.open() as source, open(target, "xb") as file:
                        shutil.copyfileobj(source, file, CHUNK)
            os.rename(whole, folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise
            refuse(f"it is damaged ({error.strerror})")
        except DAMAGED as error:
            refuse(f"it is damaged ({first_line(error)})")


def _leads_outside(name):
    parts = re.split(r"[/\\]", name)
    return name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]


class _Member(NamedTuple):
    """A member of an archive, whatever its format."""

    name: str
    size: int  # bytes
    is_plain: bool
    open: Callable


def _members(archive, opened):
    """Yield a `_Member` for everything in `archive` but folders; `opened` closes the archive."""
    if archive.suffix == ".zip":
        whole = opened.enter_context(zipfile.ZipFile(archive))
        for entry in whole.infolist():
            if entry.is_dir():
                continue
            kind = stat.S_IFMT(entry.external_attr >> 16)
            is_plain = kind in (0, stat.S_IFREG)
            content = functools.partial(whole.open, entry)
            yield _Member(entry.filename, entry.file_size, is_plain, content)
    else:
        whole = opened.enter_context(tarfile.open(archive))
        for entry in whole:
            if entry.isdir():
                continue
            content = functools.partial(whole.extractfile, entry)
            yield _Member(entry.name, entry.size, entry.isfile(), content)
