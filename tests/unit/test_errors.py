"""What an exception says in short."""

import pytest

from ddp_common.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (EOFError(), "EOFError"),
        (RuntimeError(""), "RuntimeError"),
        (RuntimeError("\nlate"), "RuntimeError"),
    ],
)
def test_the_first_line_of_an_error_is_never_empty(error, line):
    assert first_line(error) == line
