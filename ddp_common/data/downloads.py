"""Files from the network that may be trusted: resumed, verified, taken from the next address when one fails, unpacked without surprises.

A file is written under the name of its digest (`.images.tar-a443fc2f.part`) and gets its own when all of it has come and the digest
fits. A download that broke off is gone on with, also by the next program. Promises: what has its name is whole; what comes out of an
archive lies in its folder and is a plain file; after a failure nothing is left but a part that can be gone on with.
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
from pathlib import Path

import pooch
import requests
from tqdm import tqdm

from ddp_common.errors import Error

pooch.get_logger().setLevel("WARNING")  # the progress bar says what is downloaded
ATTEMPTS = 5  # at one address, as long as something comes
PAUSE = 1.0  # seconds, times the number of attempts so far
TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 14  # bytes; what came of a chunk is lost when the connection breaks in it


@contextlib.contextmanager
def only_one(folder, wait=False):
    """Let one program at a time work on `folder`, which is made; the others wait, or raise `Error`. An OSError becomes an `Error`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / f".{folder.name}.lock", "w") as lock:
            _lock(lock, folder, wait)
            yield
    except OSError as error:
        room = (
            " Make room there."
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else " Work in a copy of the repository that is yours to write to."
        )
        raise Error(
            f"{folder} cannot be written: {error.strerror or error}. Nothing half-written was left.{room}"
        ) from None


def _lock(file, folder, wait):
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise Error(
            f"Another program is downloading to {folder} at this moment. Wait until it is done."
        ) from None
    except (ImportError, OSError):  # a system without such locks
        return  # two programs at once waste time there, and what they leave is whole all the same


def retrieve(file, folder, parts, progressbar=True):
    """Bring `file`, an entry of the registry (url, name, sha256, size, mirrors), to `folder`; returns its path.

    A mirror is a dict with a url, and a digest of its own (sha256 or md5) where its copy is another. What breaks off stays in the
    folder `parts`. Raises `Error` that says of each address why it was no use; OSError when the disk does not take it.
    """
    failures, sources = (
        [],
        [file, *({"sha256": file["sha256"], **mirror} for mirror in file.get("mirrors", ()))],
    )
    while sources:
        source = sources.pop(0)
        digest = (
            f"md5:{source['md5']}"
            if "md5" in source
            else source["sha256"] and f"sha256:{source['sha256']}"
        )
        part = (
            parts / f".{file['name']}-{digest.partition(':')[2][:8]}.part"
            if digest
            else folder / f".{file['name']}.part"
        )
        begun_earlier = part.exists()
        downloader = functools.partial(
            _download,
            part=part,
            size=source.get("size"),
            resumable=bool(digest),
            progressbar=progressbar,
        )
        try:
            return Path(
                pooch.retrieve(
                    source["url"],
                    known_hash=digest,
                    fname=file["name"],
                    path=folder,
                    downloader=downloader,
                )
            )
        except (
            requests.RequestException,
            ValueError,
        ) as error:  # ValueError: the digest, or the length, differs
            failures.append(f"{source['url']}: {_innermost(error)}")
            if begun_earlier and not part.exists():
                sources.insert(
                    0, source
                )  # what was there earlier was no beginning of it: once more from the start
        except OSError:  # a full disk
            part.unlink(missing_ok=True)
            raise
    raise Error(
        f"Downloading {file['name']} failed. {' '.join(failure.rstrip('.') + '.' for failure in failures)} Nothing was changed. Check "
        "the network (a proxy? HTTPS_PROXY) and run the command again: it goes on where it broke off. data=shipped needs no download."
    )


def _innermost(error):
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return error


def _download(url, output_file, _, *, part, size, resumable, progressbar):
    """What pooch calls to download: into `part`, from where that ends, and again if the connection breaks; then it becomes `output_file`."""
    for attempt in range(ATTEMPTS):
        begun = part.stat().st_size if resumable and part.exists() else 0
        try:
            _stream(url, part, begun, size, progressbar)
            break
        except requests.RequestException:
            came = part.stat().st_size if part.exists() else 0
            if attempt == ATTEMPTS - 1 or came <= begun:
                raise
            time.sleep(PAUSE * attempt)
    os.replace(part, output_file)


def _stream(url, part, begun, size, progressbar):
    """Write the bytes of `url` from `begun` on to the end of `part`; all of them where the server knows no ranges."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={begun}-"} if begun else {})
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
        if begun and response.status_code == requests.codes.requested_range_not_satisfiable:
            return  # all is here; the digest will tell
        response.raise_for_status()
        goes_on = response.status_code == requests.codes.partial_content
        total = size or begun * goes_on + int(response.headers.get("Content-Length", 0)) or None
        with (
            open(part, "ab" if goes_on else "wb") as file,
            tqdm(
                total=total,
                initial=file.tell(),
                desc=part.name[1:].rpartition("-")[0] or part.name,
                unit="B",
                unit_scale=True,
                disable=not progressbar,
            ) as bar,
        ):
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
                if size and file.tell() > size:
                    break
            came = file.tell()
    if size and came > size:
        part.unlink()
        raise ValueError(f"sends more than the {size:,} bytes that the file has")
    if (
        size and came < size and "Content-Length" not in response.headers
    ):  # else requests has noticed, and the digest will tell
        raise requests.ConnectionError(f"broke off after {came:,} of {size:,} bytes")


def unpack(archive, folder, progressbar=True, *, bytes, files):
    """Unpack the zip or tar `archive` into the new folder `folder`, which gets its name when it is whole; until then it lies beside `archive`.

    Only plain files are written. Raises `Error`, and leaves nothing, for a member that would lie outside, a link or device, more than
    `bytes` in all or more than `files`, a damaged archive; OSError for a full disk.
    """

    def refuse(why):
        raise Error(
            f"{archive.name} is not unpacked: {why}. Nothing was changed. It is not the archive that is expected; do not use it."
        )

    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpacking-") as temporary:
        try:
            with contextlib.ExitStack() as opened:
                members = tqdm(
                    _members(archive, opened),
                    desc=f"unpacking {archive.name}",
                    unit=" files",
                    disable=not progressbar,
                )
                for count, (name, size, is_plain, content) in enumerate(members, 1):
                    if (
                        name.startswith(("/", "\\"))
                        or ".." in (parts := re.split(r"[/\\]", name))
                        or ":" in parts[0]
                    ):
                        refuse(f"its member {name!r} would lie outside of the folder")
                    if not is_plain:
                        refuse(f"its member {name!r} is a link or a device, not a plain file")
                    bytes, files = bytes - size, files - 1
                    if bytes < 0 or files < 0:
                        refuse(f"it holds more than it should, at its member {count:,}, {name!r}")
                    target = Path(temporary, "whole", name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with content() as source, open(target, "xb") as file:
                        shutil.copyfileobj(source, file, CHUNK)
            os.rename(Path(temporary, "whole"), folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise
            refuse(f"it is damaged ({error.strerror})")
        except (
            zipfile.BadZipFile,
            tarfile.TarError,
            zlib.error,
            EOFError,
            ValueError,
            RuntimeError,
        ) as error:
            refuse(
                f"it is damaged ({str(error).splitlines()[0]})"
            )  # RuntimeError: encrypted, or packed by an unknown method


def _members(archive, opened):
    """Yield (name, size, whether it is a plain file, a function that opens it) of everything in `archive` but folders."""
    if archive.suffix == ".zip":
        whole = opened.enter_context(zipfile.ZipFile(archive))
        for member in whole.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if not member.is_dir():
                yield (
                    member.filename,
                    member.file_size,
                    kind in (0, stat.S_IFREG),
                    functools.partial(whole.open, member),
                )
    else:
        whole = opened.enter_context(tarfile.open(archive))
        for member in whole:
            if not member.isdir():
                yield (
                    member.name,
                    member.size,
                    member.isfile(),
                    functools.partial(whole.extractfile, member),
                )
