"""The lines that `make run` prints while training goes on."""

import contextlib
import fcntl
import io
import os
import re
import struct
import sys
import termios

import pytest

from dask_ranks.run.progress import Progress, is_terminal, say
from ddp_common import Error


@pytest.fixture
def progress(monkeypatch):
    monkeypatch.setenv("DDP_PROGRESS", "lines")
    return Progress()


def place(epoch, step):
    return {"epoch": epoch, "step": step, "samples": 10 * step, "epochs": 2, "total_samples": 40}


def printed(capsys):
    return re.sub(r"  [\d,]+ samples/s", "", capsys.readouterr().err)


def test_the_loss_of_an_epoch_is_that_of_all_ranks_though_one_reports_late(progress, capsys):
    progress.position(place(0, 1))
    progress.record({"loss": 1.0, "epoch": 0}, rank=0)
    progress.record({"loss": 2.0, "epoch": 0}, rank=1)
    progress.last_line = progress.last_line[0] - 10, 0  # began ten seconds ago
    progress.position(place(1, 3))  # the rank that leads goes on to the second epoch
    progress.record({"loss": 0.0, "epoch": 1, "batch": 30}, rank=0)
    assert not printed(capsys)
    progress.record({"loss": 6.0, "epoch": 0}, rank=1)
    assert not printed(capsys)
    progress.record({"loss": 0.5, "epoch": 1, "batch": 10}, rank=1)
    progress.position(place(1, 4))
    assert capsys.readouterr().err == "1 of 2 epochs  loss 3.000  3 samples/s\n"
    progress.close()
    assert printed(capsys) == "2 of 2 epochs  loss 0.1250\n"


def test_other_numbers_stand_in_the_line_of_the_epoch_in_which_they_were_reported(
    progress, capsys
):
    progress.position(place(0, 1))
    for rank in (0, 1):
        progress.record({"loss": 1.0, "epoch": 0, "step": 1, "time": 5.0}, rank)
    progress.record({"accuracy": 0.5, "epoch": 0}, rank=0)
    progress.position(place(1, 3))
    progress.record({"loss": 2.0, "rate": 0.1, "epoch": 1}, rank=0)
    progress.record({"accuracy": 0.6, "epoch": 0}, rank=1)  # after its last batch, and late
    progress.record({"accuracy": 0.8, "epoch": 0}, rank=1)
    progress.record({"loss": 2.0, "rate": 0.3, "epoch": 1}, rank=1)
    assert printed(capsys) == "1 of 2 epochs  loss 1.000  accuracy 0.6500\n"
    progress.record({"accuracy": 0.9, "epoch": 1}, rank=0)  # within the last epoch
    progress.close()
    assert printed(capsys) == "1.5 of 2 epochs  loss 2.000  accuracy 0.9000  rate 0.2000\n"


def test_three_other_numbers_are_shown_the_newest_names_as_far_as_they_fit(progress, capsys):
    few = dict.fromkeys(["first", "second", "third", "fourth"], 1.0)
    many = {"validation_accuracy_of_the_smaller_model": 1.0, **few}
    progress.position(place(1, 4))
    for epoch, names in enumerate([few, many]):
        progress.record({"loss": 1.0, "epoch": epoch, **names})
    progress.close()
    said = printed(capsys).splitlines()
    assert said[0] == "1 of 2 epochs  loss 1.000  first 1.000  second 1.000  third 1.000"
    assert said[1] == "2 of 2 epochs  loss 1.000  validation_accuracy_of_the_smaller_model 1.000"


@pytest.mark.parametrize(
    "columns, whose, end",
    [
        (80, "", " to go, loss 0.2500  accuracy 0.5000"),
        (80, "rank 0: ", " to go, rank 0: loss 0.2500  accuracy 0.5000"),
        (120, "", " samples/s · 00:00 to go, loss 0.2500  accuracy 0.5000  rate 0.001000"),
        (60, "", " to go, loss 0.2500"),
    ],
)
def test_a_bar_shows_other_numbers_and_never_the_half_of_one(monkeypatch, columns, whose, end):
    try:
        reader, writer = os.openpty()
    except OSError:
        pytest.skip("this machine has no pseudo-terminals")
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = Progress()
        progress.whose = whose
        progress.position(place(0, 1))
        progress.record({"loss": 0.25, "rate": 0.001, "epoch": 0})
        progress.record({"accuracy": 0.5, "epoch": 0})
        progress.position(place(1, 4))
        progress.close()
    said = b""
    with contextlib.suppress(OSError):  # so a terminal ends whose other side is closed
        while True:
            said += os.read(reader, 10_000)
    os.close(reader)
    first, *_, last = said.decode().strip().split("\r")
    assert first.startswith("0.5 of 2 epochs")
    assert last.endswith(end) and len(last) <= columns, last


def test_what_cannot_be_shown_ends_nothing_and_a_letter_that_is_unknown_is_spelled_out():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed_pipe:
        say("nobody reads this", closed_pipe)
        with contextlib.suppress(BrokenPipeError):
            closed_pipe.close()
    say("a closed file", closed_pipe)
    memory = io.BytesIO()
    latin = io.TextIOWrapper(memory, encoding="latin-1")
    say("→ 1", latin)
    assert memory.getvalue() == b"\\u2192 1\n"


class Tee:
    """What some programs put in the place of `sys.stderr`."""

    def write(self, text):
        return len(text)


def test_a_stream_that_is_closed_or_of_ones_own_is_no_terminal(tmp_path):
    closed = (tmp_path / "out").open("w")
    closed.close()
    assert not any(map(is_terminal, [None, closed, Tee()]))


def test_an_unknown_kind_of_progress_is_refused(monkeypatch):
    monkeypatch.setenv("DDP_PROGRESS", "dots")
    with pytest.raises(Error, match="DDP_PROGRESS=dots is none of off, bar, lines"):
        Progress()
