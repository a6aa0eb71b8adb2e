"""Set-up: a virtual environment with everything in it. `make setup` runs this file.

Any Python of 3.11 or newer will do, and nothing but Python is needed.

    VENV=.venv TORCH="--index-url URL" python3 install.py

VENV is the folder, TORCH what pip is told for torch and torchvision alone. Before anything is
installed it looks at what usually goes wrong: a folder that is not yours, too small a disk, no way
to the package index. Whatever pip is told by its own settings (an index, a proxy, PIP_NO_INDEX
with a wheel house) holds. A first set-up that was interrupted is started afresh; pip keeps what it
has downloaded.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOM = 1.7e9  # bytes of an environment with torch for the CPU
ROOM_TO_DOWNLOAD = 0.5e9  # bytes of the packages as they come
REACH_TIMEOUT = 10  # seconds that a package index has to answer
QUIET_INTERVAL = 10  # seconds between two lines where nobody looks at a terminal
INDEX = "https://pypi.org/simple"


class Refused(Exception):
    """What keeps the set-up from going on, and what to do."""


def main():
    root = Path(__file__).resolve().parent
    folder = root / os.environ.get("VENV", ".venv")
    torch = shlex.split(os.environ.get("TORCH", ""))
    os.chdir(root)
    check_folder(root, folder)
    check_room(folder)
    make_environment(folder)
    check_index(folder, torch)
    if torch:
        install(folder, "torch and torchvision", [*torch, "torch", "torchvision"])
    else:
        install(folder, "torch", ["torch"])
    install(folder, "the other packages of pyproject.toml", ["-e", ".[dev]"])
    (folder / "unfinished").unlink(missing_ok=True)
    (folder / "installed").touch()


def say(text):
    print(text, flush=True)


def check_folder(root, folder):
    """Raise `Refused` unless one may write to the repository and to where the environment is."""
    for place in (root, nearest(folder)):
        if not os.access(place, os.W_OK | os.X_OK):
            raise Refused(
                f"You may not write to {place}, so nothing can be installed there. Work in a copy "
                "of the repository that is yours:\n"
                f"  git clone {shlex.quote(str(root))} ~/{root.name} && cd ~/{root.name}"
            )
    if (
        folder.is_dir()
        and any(folder.iterdir())
        and not is_environment(folder)
        and not (folder / "unfinished").exists()
    ):
        raise Refused(
            f"{folder} is there and is no virtual environment. Nothing was changed. Remove it, or "
            "name another folder: make setup VENV=…"
        )


def nearest(path):
    """The folder that is there and in which `path` is, or will be."""
    while not path.is_dir():
        path = path.parent
    return path


def is_environment(folder):
    return (folder / "pyvenv.cfg").exists()


def check_room(folder):
    """Raise `Refused` for a disk that is too small for what is still to come."""
    if (folder / "installed").exists():
        return  # nobody knows how much of it is to be replaced
    for place, needed, remedy in (
        (
            nearest(folder),
            ROOM - size_of(folder),
            "Make room there, or put the environment on another disk: make setup "
            "VENV=/path/to/.venv",
        ),
        (
            Path(tempfile.gettempdir()),
            ROOM_TO_DOWNLOAD,
            "pip downloads to that place. Make room there, or name another one: TMPDIR=/path "
            "make setup",
        ),
    ):
        free = shutil.disk_usage(place).free
        if free < needed:
            raise Refused(
                f"The disk of {place} has {free / 1e9:.2f} GB free, and {needed / 1e9:.1f} GB are "
                f"needed. Nothing was installed. {remedy}"
            )


def size_of(folder):
    """Bytes of all files in a folder, 0 if there is none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(place, name)).st_size
    return total


def make_environment(folder):
    if is_environment(folder) and not (folder / "unfinished").exists():
        say(f"Bringing {folder.name}/ up to date")
        return
    again = folder.exists()
    say(
        f"Setting up {folder.name}/ with Python {sys.version.split()[0]}: a few minutes, once"
        + (
            ". An earlier set-up was interrupted; this one starts afresh"
            if again and any(folder.iterdir())
            else ""
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    if again:
        for each in folder.iterdir():
            if each.name != "unfinished":
                remove(each)
    (folder / "unfinished").touch()
    try:
        venv.create(folder, with_pip=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(
            f"The virtual environment {folder} could not be made: {error}. On Debian and Ubuntu: "
            "apt install python3-venv"
        ) from None


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def check_index(folder, torch):
    """Raise `Refused` if pip's package index surely cannot be reached.

    Where pip has ways of its own, pip shall try.
    """
    settings = pip_settings(folder)
    if {"no-index", "find-links", "extra-index-url", "proxy", "cert"} & set(settings):
        return
    addresses = [settings.get("index-url", INDEX)]
    addresses += [
        word.partition("=")[2] or after
        for word, after in zip(torch, [*torch[1:], ""])
        if word.startswith(("--index-url", "-i"))
    ]
    for address in addresses:
        if reason := why_unreachable(address):
            raise Refused(
                f"The package index {without_password(address)} cannot be reached: {reason}. "
                "Nothing was installed. Is there a network, and "
                "does it want a proxy (HTTPS_PROXY)? Without one, pip takes wheels from a "
                "folder:\n"
                "  PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels make setup\n"
                "which `pip download -d /path/to/wheels -c constraints.txt '.[dev]' setuptools` "
                "fills where there is a network."
            )


def pip_settings(folder):
    """What pip has been told by its files and by the environment: a dict of option -> text."""
    said = subprocess.run(
        [python_of(folder), "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    found = {}
    for line in said.splitlines():
        name, equals, value = line.partition("=")
        option = name.rpartition(".")[2]
        section = name.rpartition(".")[0]
        if equals and section in ("global", "install", ":env:"):
            try:
                found[option] = str(ast.literal_eval(value))
            except (ValueError, SyntaxError):
                found[option] = value
    return found


def why_unreachable(address):
    """Why a package index gives no answer; None if it gives one, or if that is not certain."""
    if not address.startswith(("http://", "https://")):
        return None
    try:
        urllib.request.urlopen(f"{address.rstrip('/')}/pip/", timeout=REACH_TIMEOUT).close()
    except urllib.error.HTTPError:
        return None  # it has answered
    except urllib.error.URLError as error:
        certain = isinstance(error.reason, OSError) and "SSL" not in type(error.reason).__name__
        return (error.reason.strerror or str(error.reason)) if certain else None
    except TimeoutError:
        return f"no answer within {REACH_TIMEOUT} s"
    except (OSError, ValueError):
        return None
    return None


def without_password(address):
    return re.sub(r"//[^/@]*@", "//", address)


def python_of(folder):
    return str(folder / "bin" / "python")


def install(folder, what, arguments):
    """Let pip install, and say what it is doing. Raises `Refused` with the reason if it fails."""
    say(f"Installing {what} in the versions of constraints.txt")
    command = [
        python_of(folder),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar",
        "off",
        "-c",
        "constraints.txt",
        *arguments,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines = []
    reader = threading.Thread(target=keep_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        follow(process, lines)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
    reader.join(5)
    if process.returncode:
        raise Refused(explain("\n".join(lines)))


def keep_lines(stream, lines):
    for line in stream:
        lines.append(line.rstrip())


def follow(process, lines):
    """Until `process` ends: on a terminal one line that changes, elsewhere a line now and then."""
    began, told, terminal = time.monotonic(), time.monotonic(), sys.stdout.isatty()
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        text = f"  {now - began:3.0f} s  {doing(lines)}"
        if terminal:
            print(f"\r{text:<78.78}", end="", flush=True)
        elif now - told >= QUIET_INTERVAL:
            say(text)
            told = now
    if terminal:
        print(f"\r{'':<78}\r", end="")
    say(
        f"  done in {time.monotonic() - began:.0f} s"
        if process.returncode == 0
        else f"  failed after {time.monotonic() - began:.0f} s"
    )


def doing(lines):
    """What pip does now, by what it has said."""
    for line in reversed(list(lines)):
        if line.startswith("Installing collected packages"):
            return f"writing {line.count(',') + 1} packages to the disk"
        words = line.split()
        if words[:1] in (["Collecting"], ["Downloading"]) or words[:2] == ["Using", "cached"]:
            return f"looking for {words[1]}" if words[0] == "Collecting" else " ".join(words)
    return "starting pip"


CAUSES = (
    (
        r"No space left|Errno 28|Disk quota",
        "The disk is full. Make room (an environment takes about 1.7 GB), or use another disk: "
        "make setup VENV=/path/to/.venv",
    ),
    (
        r"Permission denied|Errno 13|Read-only file system",
        "A file may not be written. Work in a copy of the repository that is yours.",
    ),
    (
        r"NewConnectionError|Max retries|Name or service|name resolution|Network is unreachable|"
        r"timed out|ProxyError|SSLError|CERTIFICATE|Connection (refused|reset)",
        "The package index did not answer. Check the network (a proxy? HTTPS_PROXY), and run the "
        "command again: what has been downloaded is kept.",
    ),
    (
        r"ResolutionImpossible|No matching distribution|Could not find a version",
        "A package is not to be had in the version of constraints.txt: the index, or the folder "
        "of PIP_FIND_LINKS, lacks it for this Python "
        f"({sys.version_info[0]}.{sys.version_info[1]}) and system, or the network failed on the "
        "way.",
    ),
)


def explain(said):
    """What pip's failure means, what to do, and the end of what it said."""
    cause = next(
        (meaning for pattern, meaning in CAUSES if re.search(pattern, said)),
        "pip failed. Set right what it says, and run the command again.",
    )
    last = [
        line
        for line in said.splitlines()
        if line.startswith(("ERROR", "error", "WARNING: Retrying"))
    ][-3:] or said.splitlines()[-5:]
    return cause + "\nWhat pip says:\n" + "\n".join(f"  {line[:300]}" for line in last)


if __name__ == "__main__":
    try:
        main()
    except Refused as refused:
        sys.exit(f"\nError: {refused}")
    except OSError as error:
        sys.exit(
            f"\nError: {error.filename or 'The environment'} cannot be written: {error.strerror}. "
            "Make room, or set up where you may write."
        )
    except KeyboardInterrupt:
        sys.exit("\nStopped. Run the command again: what has been downloaded is kept.")
