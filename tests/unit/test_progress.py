"""The lines that `make run` prints while training goes on."""

import contextlib
import io
import os
import re

import pytest

from ddp_common import Error
from ddp_common.run.progress import Progress, is_terminal, say


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
    progress.position(place(1, 3))  # the rank that leads goes on to the second epoch
    progress.record({"loss": 0.0, "epoch": 1}, rank=0)
    assert not printed(capsys)
    progress.record({"loss": 6.0, "epoch": 0}, rank=1)
    assert not printed(capsys)
    progress.record({"loss": 0.5, "epoch": 1}, rank=1)
    assert printed(capsys) == "1 of 2 epochs  loss 3.000\n"
    progress.close()
    assert printed(capsys) == "2 of 2 epochs  loss 0.2500\n"


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
