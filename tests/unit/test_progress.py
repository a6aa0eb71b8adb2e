"""The lines that `make run` prints while training goes on."""

import re

import pytest

from ddp_common.run.progress import Progress


@pytest.fixture
def progress(monkeypatch):
    monkeypatch.setenv("DDP_PROGRESS", "lines")
    return Progress()


def place(epoch, step):
    return {"epoch": epoch, "step": step, "samples": 10 * step, "epochs": 2, "total_samples": 40}


def printed(capsys):
    return re.sub(r"  [\d,]+ samples/s", "", capsys.readouterr().out)


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
