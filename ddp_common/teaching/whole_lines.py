"""Runs a script whose lines arrive whole.

    python -m ddp_common.teaching.whole_lines SCRIPT [ARGUMENT …]

torchrun starts Python unbuffered, so that `print(a, b)` writes `a`, a space, `b` and the newline
one after the other. It looks ten times a second at what its ranks have written, and puts the
rank's number before whatever is new: also before the second half of a line. Here a line is
written at once, when it ends.
"""

import os
import runpy
import sys
from io import TextIOWrapper
from types import TracebackType


def main(script: str, *arguments: str) -> None:
    """Run the script as its own program would; what it raises ends this one likewise."""
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper), "it is Python's own"
        stream.reconfigure(line_buffering=True, write_through=False)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    sys.excepthook = _show_from(script)
    runpy.run_path(script, run_name="__main__")


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
