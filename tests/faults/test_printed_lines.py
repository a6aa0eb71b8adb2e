"""What a rank prints becomes lines: bounded, in linear time, whatever it prints."""

import pytest

from ddp_common.worker import output
from ddp_common.worker.output import Output


def printed(text, size=2**16):
    """The lines of a text that arrives in pieces of so many bytes."""
    relayed, content, lines = Output(), text.encode(), []
    for begin in range(0, len(content), size):
        lines += relayed.lines(content[begin : begin + size])
    return lines + relayed.rest()


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


def test_a_long_line_is_cut_and_says_so():
    assert printed("x" * 30_000_000) == ["x" * output.LONGEST_LINE + " … [cut here]"]


def test_an_avalanche_of_lines_is_bounded_and_its_first_and_last_lines_are_kept(monkeypatch):
    monkeypatch.setattr(output.time, "monotonic", lambda: 0.0)  # all within one second
    lines = printed("".join(f"line {number}\n" for number in range(100_000)))
    assert lines[0] == "line 0" and lines[-1] == "line 99999"
    assert sum(map(len, lines)) < output.RATE
    (said,) = [line for line in lines if "lines left out" in line]
    left_out = int(said.split()[1].strip("[").replace(",", ""))
    assert left_out + len(lines) - 1 == 100_000


def test_what_was_held_back_comes_a_second_later_also_if_nothing_more_is_printed(monkeypatch):
    now = 0.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    relayed = Output()
    passed = relayed.lines(b"line\n" * 100_000 + b"the last\n")
    assert passed[-1] == "line" and relayed.due() == []
    now = 2.0
    assert relayed.due()[-1] == "the last"
