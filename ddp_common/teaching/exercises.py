"""What the exercises of the tutorials share: a check is run, and whatever goes wrong in the answer is said in a few words."""

import traceback

from ddp_common.errors import RankFailed


def judge(check, answer):
    """Run `check(answer)`, which prints whether `answer`, a function, is right. If it raises, that is shown as one more wrong answer.

    What the check returns is dropped, so that nothing but its words stands under the cell.
    """
    name = getattr(answer, "__name__", repr(answer))
    try:
        check(answer)
    except RankFailed as failure:
        print("not yet:", str(failure).splitlines()[0])
        if where := failure.traceback.strip().splitlines()[-5:]:  # the line that failed, and why
            print("\n".join(where))
    except Exception as error:  # whatever a student's function may raise
        said = "".join(traceback.format_exception_only(error)).strip()
        place = _place_in(answer, error)
        if place is None:
            print(f"not yet: the check cannot use what {name} returns\n  {said}")
        else:
            print(f"not yet: {name} raises an error in its {place}\n  {said}")


def _place_in(function, error):
    """'line 3: the line itself' of `function` in which `error` came up; None if it came up elsewhere, when `function` had returned."""
    code = getattr(function, "__code__", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if code is not None and (frame.name, frame.filename) == (code.co_name, code.co_filename):
            return f"line {frame.lineno - code.co_firstlineno + 1}: {frame.line or ''}".rstrip(
                ": "
            )
    return None
