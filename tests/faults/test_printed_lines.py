"""What a rank prints becomes lines: bounded, in linear time, whatever it prints."""

import os
import time

import pytest

from ddp_common.worker import lines as relayed


class Printed:
    """A pipe that `Lines` reads: what is written into it, and the lines that come of it."""

    def __init__(self):
        self.lines, (self.read_end, self.write_end) = [], os.pipe()
        self.reader = relayed.Lines(lambda message: self.lines.append(message.text))

    def fileno(self):
        return self.read_end

    def write(self, text):
        content = text.encode()
        for begin in range(0, len(content), 2**15):
            os.write(self.write_end, content[begin : begin + 2**15])
            assert self.reader.read(self)
            self.reader.flush_if_due()

    def close(self):
        os.close(self.write_end)
        assert not self.reader.read(self)
        self.reader.close()
        os.close(self.read_end)
        return self.lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one\n\ntwo", ["one", "", "two"]),
        ("from DOS\r\n", ["from DOS"]),
        ("\r 1%\r 2%\nnext\n", [" 2%", "next"]),
        ("\n", [""]),
    ],
)
def test_lines_are_what_a_terminal_would_show(text, lines):
    printed = Printed()
    printed.write(text)
    assert printed.close() == lines


@pytest.mark.parametrize("size", [3])
def test_it_does_not_matter_in_which_pieces_a_line_arrives(size):
    text, printed = " 1%\r 2%\r\n\nüber\r\nlast\r", Printed()
    content = text.encode()
    for begin in range(0, len(content), size):
        os.write(printed.write_end, content[begin : begin + size])
        printed.reader.read(printed)
    assert printed.close() == [" 2%", "", "über", "last"]


def test_a_progress_bar_shows_where_it_is_every_few_seconds(monkeypatch):
    monkeypatch.setattr(relayed, "STATE_INTERVAL", 0.05)
    printed = Printed()
    printed.write("\r 1%\r 2%")
    time.sleep(0.1)
    printed.reader.flush_if_due()
    printed.reader.flush_if_due()
    assert printed.lines == [" 2%"]
    printed.write("\r 3%\r 4%\n")
    assert printed.close() == [" 2%", " 4%"]


def test_a_long_line_is_cut_and_says_so():
    printed = Printed()
    printed.write("x" * 30_000_000)
    (line,) = printed.close()
    assert line == "x" * relayed.LONGEST_LINE + " ... [cut here: 29990000 more bytes]"


def test_an_avalanche_of_lines_is_bounded_and_its_first_and_last_lines_are_kept():
    printed = Printed()
    printed.write("".join(f"line {number}\n" for number in range(1_000_000)))
    lines = printed.close()
    assert lines[0] == "line 0" and lines[-1] == "line 999999"
    assert sum(map(len, lines)) < 3 * relayed.PRINT_BURST
    said = [
        int(line.split()[1].strip("[").replace(",", ""))
        for line in lines
        if "lines left out" in line
    ]
    assert said and sum(said) + len(lines) - len(said) == 1_000_000
