"""Runs a script whose lines arrive whole.

    python -m ddp_common.teaching.whole_lines SCRIPT [ARGUMENT …]

torchrun starts Python unbuffered, so that `print(a, b)` writes `a`, a space, `b` and the newline
one after the other. It looks ten times a second at what its ranks have written, and puts the
rank's number before whatever is new: also before the second half of a line. Here a line is
written at once, when it ends.
"""

import atexit
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType, TracebackType


def main(script: str, *arguments: str) -> None:
    """Run the script as its own program would; what it raises ends this one likewise."""
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper), "it is Python's own"
        stream.reconfigure(line_buffering=True, write_through=False)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    sys.excepthook = _show_from(script)
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    ending = _Ending()
    atexit.register(ending.leave)  # the script's own functions, registered later, come before it
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), module.__dict__)
    except SystemExit as left:
        ending.note(left)
        raise
    ending.code = 0


class _Ending:
    """Ends the process without taking the script's objects apart.

    torch 2.13 may hang there, or abort ("terminate called without an active exception"), if the
    last `backward` of a DistributedDataParallel was only a moment ago: its gloo group waits for a
    thread that waits for Python's lock. A script that is right would be called failed.
    """

    code = 1  # unless it is known better: something was raised

    def note(self, left: SystemExit) -> None:
        if left.code is None:
            self.code = 0
        elif isinstance(left.code, int):
            self.code = left.code & 0xFF

    def leave(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)


def _show_from(script):
    """An `excepthook` that leaves out the calls which have led to the script."""

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        inside = traceback
        while inside is not None and inside.tb_frame.f_code.co_filename != script:
            inside = inside.tb_next
        sys.__excepthook__(kind, error.with_traceback(inside), inside)

    return show


if __name__ == "__main__":
    main(*sys.argv[1:])
