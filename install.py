"""Set-up: a virtual environment with everything in it.

    VENV=.venv TORCH="--index-url URL" python3 install.py
    VENV=.venv .venv/bin/python install.py docs     # add an extra of pyproject.toml

`make setup` runs this file with any Python of 3.11 or newer; nothing but Python is needed. VENV is
the folder, TORCH what pip is told for torch and torchvision alone. Before anything is installed,
what usually goes wrong is checked: a folder that is not yours, too small a disk, no way to the
package index. What pip is told by its own settings (an index, a proxy, PIP_NO_INDEX with a wheel
house) holds. uv installs the packages where it can be had and knows these settings too, since it
takes less than half of pip's time; where it cannot, or where it fails, pip does it and says what
is wrong. Promises: a first set-up that was interrupted is started afresh; what has been
downloaded is kept.
"""

import ast
import http.client
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
from collections.abc import Mapping
from pathlib import Path

ROOM = 2.3e9  # bytes of an environment with torch for the CPU
ROOM_TO_DOWNLOAD = 0.5e9  # bytes of the packages as they come
REACH_TIMEOUT = 10  # seconds that a package index has to answer
QUIET_INTERVAL = 10  # seconds between two lines where nobody looks at a terminal
INDEX = "https://pypi.org/simple"
OTHER_WAYS = {"no-index", "find-links", "extra-index-url", "proxy", "cert"}  # of pip to packages

# pip's settings that uv takes as options, and those that it takes as variables
OPTIONS_OF_UV = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES_OF_UV = {
    "cert": ("SSL_CERT_FILE",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "cache-dir": (),  # uv has a folder of its own
    "config-file": (),
    "disable-pip-version-check": (),
    "no-input": (),
    "progress-bar": (),
    "root-user-action": (),
}


class Refused(Exception):
    """What keeps the set-up from going on, and what to do about it."""


def main(extra: str | None = None):
    root = Path(__file__).resolve().parent
    folder = root / os.environ.get("VENV", ".venv")
    torch = shlex.split(os.environ.get("TORCH", ""))
    os.chdir(root)
    check_folder(root, folder)
    if extra:
        add(folder, extra)
        return
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


def add(folder: Path, extra: str):
    """Add an extra of pyproject.toml to the environment that is there."""
    check_index(folder, [], extra)
    install(folder, f"what `make {extra}` needs", ["-e", f".[{extra}]"])
    (folder / f"installed-{extra}").touch()


def say(text: str):
    print(text, flush=True)


def check_folder(root: Path, folder: Path):
    """Raise `Refused` unless one may write to the repository `root`, and to `folder`.

    `folder` is that of the environment, or will be.
    """
    for place in (root, nearest(folder)):
        if not os.access(place, os.W_OK | os.X_OK):
            raise Refused(
                f"You may not write to {place}, so nothing can be installed there. "
                "Work in a copy of the repository that is yours:\n"
                f"  git clone {shlex.quote(str(root))} ~/{root.name} && cd ~/{root.name}"
            )
    is_filled = folder.is_dir() and any(folder.iterdir())
    if is_filled and not is_environment(folder) and not is_unfinished(folder):
        raise Refused(
            f"{folder} is there and is no virtual environment. Nothing was changed. "
            "Remove it, or name another folder: make setup VENV=…"
        )


def nearest(path: Path) -> Path:
    """The folder that is there and in which `path` is, or will be."""
    while not path.is_dir():
        path = path.parent
    return path


def is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists()


def is_unfinished(folder: Path) -> bool:
    return (folder / "unfinished").exists()


def check_room(folder: Path):
    """Raise `Refused` for a disk that is too small for what is still to come."""
    if (folder / "installed").exists():
        return  # nobody knows how much of it is to be replaced
    require_room(
        nearest(folder),
        ROOM - size_of(folder),
        "Make room there, or put the environment on another disk: make setup VENV=/path/to/.venv",
    )
    require_room(
        Path(tempfile.gettempdir()),
        ROOM_TO_DOWNLOAD,
        "pip downloads to that place. Make room there, or name another one: "
        "TMPDIR=/path make setup",
    )


def require_room(place: Path, needed: float, remedy: str):
    """Raise `Refused` unless the disk of `place` has so many bytes free."""
    free = shutil.disk_usage(place).free
    if free < needed:
        raise Refused(
            f"The disk of {place} has {free / 1e9:.2f} GB free, "
            f"and {needed / 1e9:.1f} GB are needed. Nothing was installed. {remedy}"
        )


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder, 0 if there is none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(place, name)).st_size
    return total


def make_environment(folder: Path):
    """Make the virtual environment, unless a finished one is there. Raises `Refused`."""
    has_python = Path(python_of(folder)).exists()  # False if what it links to was removed
    if is_environment(folder) and not is_unfinished(folder) and has_python:
        say(f"Bringing {folder.name}/ up to date")
        return
    existed = folder.exists()
    text = f"Setting up {folder.name}/ with Python {sys.version.split()[0]}: a few minutes, once"
    if existed and any(folder.iterdir()):
        why = "An earlier set-up was interrupted"
        if is_environment(folder) and not is_unfinished(folder):
            why = "The Python of the one that is there is gone"
        text += f". {why}; this one starts afresh"
    say(text)
    folder.mkdir(parents=True, exist_ok=True)
    if existed:
        for each in folder.iterdir():
            if each.name != "unfinished":
                remove(each)
    (folder / "unfinished").touch()
    try:
        venv.create(folder, with_pip=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(
            f"The virtual environment {folder} could not be made: {error}. "
            "On Debian and Ubuntu: apt install python3-venv"
        ) from None


def remove(path: Path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def check_index(folder: Path, torch: list[str], extra: str = "dev"):
    """Raise `Refused` if a package index certainly cannot be reached.

    `torch` is what pip is told for torch, `extra` what is to be installed of pyproject.toml. Where
    pip has been told other ways, it is left to try them.
    """
    settings = pip_settings(folder)
    if OTHER_WAYS & set(settings):
        return
    addresses = [settings.get("index-url", INDEX)]
    for word, after in zip(torch, [*torch[1:], ""]):
        if word.startswith(("--index-url", "-i")):
            addresses.append(word.partition("=")[2] or after)
    command = "setup" if extra == "dev" else extra
    for address in addresses:
        reason = why_unreachable(address)
        if reason:
            raise Refused(
                f"The package index {without_password(address)} cannot be reached: {reason}. "
                "Nothing was installed. Is there a network, and does it want a proxy "
                "(HTTPS_PROXY)? Without one, pip takes wheels from a folder:\n"
                f"  PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels make {command}\n"
                "which `pip download -d /path/to/wheels -c constraints.txt "
                f"'.[{extra}]' setuptools` "
                "fills where there is a network."
            )


def pip_settings(folder: Path) -> dict[str, str]:
    """What pip has been told by its files and by the environment: option -> text."""
    command = [python_of(folder), "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    found = {}
    for wanted in ("global", "install", ":env:"):  # a later one wins, as for pip
        for line in listing.splitlines():
            name, equals, value = line.partition("=")
            section, _, option = name.rpartition(".")
            if not equals or section != wanted:
                continue
            try:
                found[option] = str(ast.literal_eval(value))
            except (ValueError, SyntaxError):
                found[option] = value
    return found


def why_unreachable(address: str) -> str | None:
    """Why a package index gives no answer; None if it gives one, or if that is not certain."""
    if not address.startswith(("http://", "https://")):
        return None
    try:
        # without the password, of which urllib knows nothing: to be refused is an answer, too
        page = f"{without_password(address).rstrip('/')}/pip/"
        urllib.request.urlopen(page, timeout=REACH_TIMEOUT).close()
    except urllib.error.HTTPError:
        return None  # it has answered
    except urllib.error.URLError as error:
        reason = error.reason
        is_certain = isinstance(reason, OSError) and "SSL" not in type(reason).__name__
        return (reason.strerror or str(reason)) if is_certain else None
    except TimeoutError:
        return f"no answer within {REACH_TIMEOUT} s"
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return None


def without_password(address: str) -> str:
    return re.sub(r"//[^/@]*@", "//", address)


def python_of(folder: Path) -> str:
    return str(folder / "bin" / "python")


def install(folder: Path, what: str, arguments: list[str]):
    """Install what pip would install for `arguments`, and print what is being done.

    Raises `Refused` with the reason if it fails.
    """
    say(f"Installing {what} in the versions of constraints.txt")
    began = time.monotonic()
    pip = [python_of(folder), "-m", "pip", "install"]
    pip += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    pip += ["-c", "constraints.txt"]
    uv = how_uv_installs(folder, pip)
    if uv is None or not succeeds(*uv, arguments):
        code, lines = run([*pip, *arguments], os.environ)
        if code:
            say(f"  failed after {time.monotonic() - began:.0f} s")
            raise Refused(explain("\n".join(lines)))
    say(f"  done in {time.monotonic() - began:.0f} s")


def how_uv_installs(folder: Path, pip: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """The beginning of a command, and its environment, by which uv installs as pip would.

    `pip` is the beginning of pip's own. None where uv cannot be had (a wheel house without it, a
    system for which there is none), and where pip has a setting whose like uv does not have.
    """
    options = []
    variables = dict(os.environ)
    for name, text in pip_settings(folder).items():
        if name == "no-index":
            options += ["--no-index"] if text.lower() in ("1", "true", "yes", "on") else []
        elif name in OPTIONS_OF_UV:
            for word in text.split():
                options += [OPTIONS_OF_UV[name], word]
        elif name in VARIABLES_OF_UV:
            variables |= dict.fromkeys(VARIABLES_OF_UV[name], text)
        else:
            return None
    program = folder / "bin" / "uv"
    if not program.exists() and run([*pip, "uv"], os.environ)[0]:
        return None
    command = [str(program), "pip", "install", "--python", python_of(folder)]
    command += ["--constraints", "constraints.txt", "--index-strategy", "unsafe-best-match"]
    command += ["--compile-bytecode", "--no-progress", *options]
    return command, variables


def succeeds(command: list[str], variables: dict[str, str], arguments: list[str]) -> bool:
    """Whether uv has installed `arguments`; if not, say that pip goes on."""
    code, lines = run([*command, *arguments], variables)
    if code:
        last = lines[-1].strip() if lines else f"exit status {code}"
        say(f"  uv could not ({last[:100]}): pip tries")
    return code == 0


def run(command: list[str], variables: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a command, print its progress; its exit status and the lines that it printed."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
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
    return process.returncode, lines


def keep_lines(stream, lines: list[str]):
    for line in stream:
        lines.append(line.rstrip())


def follow(process: subprocess.Popen, lines: list[str]):
    """Print progress until `process`, which prints `lines`, ends.

    On a terminal that is one line that changes, elsewhere a line now and then.
    """
    is_terminal = sys.stdout.isatty()
    began = time.monotonic()
    last_printed = began
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        text = f"  {now - began:3.0f} s  {current_activity(lines)}"
        if is_terminal:
            print(f"\r{text:<78.78}", end="", flush=True)
        elif now - last_printed >= QUIET_INTERVAL:
            say(text)
            last_printed = now
    if is_terminal:
        print(f"\r{'':<78}\r", end="")


def current_activity(lines: list[str]) -> str:
    """What uv or pip is doing now, by the `lines` it has printed."""
    for line in reversed(list(lines)):
        if line.startswith("Installing collected packages"):
            return f"writing {line.count(',') + 1} packages to the disk"
        words = line.split()
        if words[:1] == ["Collecting"]:
            return f"looking for {words[1]}"
        if words[:1] == ["Downloading"] or words[:2] == ["Using", "cached"]:
            return " ".join(words)
        if words[:1] in (["Resolved"], ["Prepared"], ["Building"]):
            return " ".join(words)
        if words[:1] == ["Installed"]:
            return "compiling what was installed"
    return "looking for packages"


# What pip's output looks like -> what that means, and what to do.
CAUSES = (
    (
        r"No space left|Errno 28|Disk quota",
        "The disk is full. Make room (an environment takes about 2.3 GB, and several more where "
        "pip takes torch for GPUs), or use another disk: "
        "make setup VENV=/path/to/.venv",
    ),
    (
        r"Permission denied|Errno 13|Read-only file system",
        "A file may not be written. Work in a copy of the repository that is yours.",
    ),
    (
        r"NewConnectionError|Max retries|Name or service|name resolution|Network is unreachable"
        r"|timed out|ProxyError|SSLError|CERTIFICATE|Connection (refused|reset)",
        "The package index did not answer. Check the network (a proxy? HTTPS_PROXY), "
        "and run the command again: what has been downloaded is kept.",
    ),
    (
        r"ResolutionImpossible|No matching distribution|Could not find a version",
        "A package is not to be had in the version of constraints.txt: "
        "the index, or the folder of PIP_FIND_LINKS, lacks it for this Python "
        f"({sys.version_info[0]}.{sys.version_info[1]}) and system, "
        "or the network failed on the way.",
    ),
)


def explain(output: str) -> str:
    """What pip's failure means, what to do, and the end of its output."""
    cause = "pip failed. Set right what it says, and run the command again."
    for pattern, meaning in CAUSES:
        if re.search(pattern, output):
            cause = meaning
            break
    lines = output.splitlines()
    telling = ("ERROR", "error", "WARNING: Retrying")
    last = [line for line in lines if line.startswith(telling)][-3:] or lines[-5:]
    shown = "\n".join(f"  {line[:300]}" for line in last)
    return f"{cause}\nWhat pip says:\n{shown}"


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Refused as refused:
        sys.exit(f"\nError: {refused}")
    except OSError as error:
        place = error.filename or "The environment"
        sys.exit(
            f"\nError: {place} cannot be written: {error.strerror}. "
            "Make room, or set up where you may write."
        )
    except KeyboardInterrupt:
        sys.exit("\nStopped. Run the command again: what has been downloaded is kept.")
