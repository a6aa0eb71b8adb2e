"""What a rank prints becomes lines: at a bounded rate, in linear time, whatever it prints."""

import time

import pytest

import ddp_common as ddp
from dask_ranks.worker.agent import whole_lines


def printed(text, size=2**16):
    """The lines of a text that arrives in pieces of so many bytes."""
    content, lines, begun = text.encode(), [], []
    for begin in range(0, len(content), size):
        lines += whole_lines(begun, content[begin : begin + size])
    return lines + (whole_lines(begun, b"\n") if any(begun) else [])


@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one\n\ntwo", ["one", "", "two"]),
        ("from DOS\r\n", ["from DOS"]),
        ("\r 1%\r 2%\nnext\n", [" 2%", "next"]),
        (" 1%\r 2%\r\n\nüber\r\nlast\r", [" 2%", "", "über", "last"]),
        ("\n", [""]),
    ],
)
def test_lines_are_what_a_terminal_would_show_in_whatever_pieces_they_arrive(text, size, lines):
    assert printed(text, size) == lines


def test_a_long_line_is_whole_and_takes_linear_time():
    began = time.monotonic()
    assert printed("x" * 50_000_000) == ["x" * 50_000_000]
    assert time.monotonic() - began < 5


def test_a_rank_that_prints_too_fast_waits_and_loses_no_line(client):
    lines = 6_000  # of 1,000 bytes: at RATE they take six seconds

    def avalanche():
        began = time.monotonic()
        for number in range(lines):
            print(f"{number:01000d}")
        print("x" * 20_000)
        return time.monotonic() - began

    run = ddp.launch(client, avalanche, workers=1)
    assert run.result > 3
    log = (run.directory / "log.txt").read_text()
    assert log.count("[rank 0] 0") == lines and "x" * 20_000 in log
