"""What the exercises of the tutorials share: a check is run, and a failure is told in a few words.

Promises: an answer that raises an exception is one more wrong answer, not a traceback through the
check.
"""

import traceback
from collections.abc import Callable

from ddp_common.errors import RankFailed, first_line

SHOWN_LINES = 5  # of a rank's traceback


def judge(check: Callable, answer: Callable):
    """Run `check(answer)`, which prints whether `answer`, a function, is right.

    If it raises, that is printed instead. What the check returns is dropped, so that nothing but
    its words stands under the cell.
    """
    name = getattr(answer, "__name__", repr(answer))
    try:
        check(answer)
    except RankFailed as failure:
        print("not yet:", first_line(failure))
        end = failure.traceback.strip().splitlines()[-SHOWN_LINES:]
        if end:  # the line that failed, and why
            print("\n".join(end))
    except Exception as error:  # whatever a student's function may raise
        said = "".join(traceback.format_exception_only(error)).strip()
        place = _place_in(answer, error)
        if place is None:
            print(f"not yet: the check cannot use what {name} returns\n  {said}")
        else:
            print(f"not yet: {name} raises an error in its {place}\n  {said}")


def _place_in(function, error):
    """'line 3: the line itself' of `function` in which `error` came up.

    None if it came up elsewhere, when `function` had returned.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if (frame.name, frame.filename) == (code.co_name, code.co_filename):
            number = frame.lineno - code.co_firstlineno + 1
            return f"line {number}: {frame.line or ''}".rstrip(": ")
    return None
