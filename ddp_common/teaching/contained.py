"""Runs a command; when that ends, or takes too long, all that is left of it is removed.

    python -m ddp_common.teaching.contained SECONDS COMMAND [ARGUMENT …]

That is what it has started, and its temporary files: it gets a folder of its own for them, where
torchrun keeps what its ranks print. A file may grow to `LARGEST_FILE`, so that a loop which prints
for ever fills no disk: then `print` raises `OSError: File too large`.

Exit code: the command's, or `TIMED_OUT`. This process is a child subreaper (Linux, prctl(2)), so
that whatever the command leaves behind becomes its child, and it ends with the process that has
started it. Elsewhere only the command itself is ended.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ddp_common.worker.nursery import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    end_children,
    prctl,
)

TIMED_OUT = 124  # as timeout(1) says it
LARGEST_FILE = 2**30  # bytes


def main(seconds: float, command: list[str]) -> int:
    """Run the command; returns the exit code of this process."""
    signal.signal(signal.SIGTERM, _leave)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    limit_files(LARGEST_FILE)
    with tempfile.TemporaryDirectory(prefix="ddp-", ignore_cleanup_errors=True) as temporary:
        try:
            code = run_for(seconds, command, {**os.environ, "TMPDIR": temporary})
        finally:
            end_children()
        if has_full_file(Path(temporary)):
            print(
                f"A rank has printed {LARGEST_FILE / 2**30:g} GiB, and may print no more: its "
                "`print` raised OSError, File too large. Is there a loop that prints for ever?",
                flush=True,
            )
    return code if code >= 0 else 128 - code  # a signal, as a shell says it


def run_for(seconds: float, command: list[str], environment: dict[str, str]) -> int:
    """Run the command for so many seconds at most; its exit code, or `TIMED_OUT`."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return TIMED_OUT


def has_full_file(folder: Path) -> bool:
    """Whether a file in the folder, or below it, has the size that no file may exceed."""
    return any(
        path.is_file() and path.stat().st_size >= LARGEST_FILE for path in folder.rglob("*.log")
    )


def limit_files(size: int) -> None:
    """Have no file that this process or one below it writes exceed so many bytes."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hard == resource.RLIM_INFINITY or size < hard:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def _leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it would interrupt the tidying up
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
