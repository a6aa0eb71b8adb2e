"""Files from the network that can be trusted.

pooch downloads them, compares their digests, unpacks what has the right one, and leaves nothing of
a file that is not right. When one address fails, the next is tried. Promises: after a failure
nothing is left.
"""

import contextlib
import errno
from pathlib import Path

import pooch
import requests
from filelock import FileLock

from ddp_common.errors import Error

pooch.get_logger().setLevel("WARNING")  # the progress bar says what is downloaded

TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 16  # bytes


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
    target = folder / file["name"]
    processor = None
    if file.get("unpack"):
        target = target.with_suffix("")
        kind = pooch.Unzip if file["name"].endswith(".zip") else pooch.Untar
        processor = kind(extract_dir=target.name)
    failures = []
    for source in (file, *file.get("mirrors", ())):
        if "md5" in source:
            digest = f"md5:{source['md5']}"
        else:
            digest = source.get("sha256", file["sha256"])  # None: a live list, which has none
        try:
            pooch.retrieve(
                source["url"],
                known_hash=digest,
                fname=file["name"],
                path=folder,
                downloader=downloader,
                processor=processor,
            )
            return target
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
