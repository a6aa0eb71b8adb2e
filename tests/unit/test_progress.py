"""The lines that `make run` prints while training goes on."""

import re

import pytest

from ddp_common.run.progress import Progress, say_place


@pytest.fixture
def progress(monkeypatch):
    monkeypatch.setenv("DDP_PROGRESS", "lines")
    return Progress()


def place(epoch, step):
    return {"epoch": epoch, "step": step, "samples": 10 * step, "epochs": 2, "total_samples": 40}


def train_an_epoch(progress):
    """Both ranks report in the first epoch; the one that leads goes on to the second."""
    progress.position(place(0, 1))
    progress.record({"loss": 1.0, "epoch": 0}, rank=0)
    progress.record({"loss": 2.0, "epoch": 0}, rank=1)
    progress.position(place(1, 3))


def printed(capsys):
    return re.sub(r"  [\d,]+ samples/s", "", capsys.readouterr().out)


def test_the_loss_of_an_epoch_is_that_of_all_ranks_though_one_reports_late(progress, capsys):
    train_an_epoch(progress)
    progress.record({"loss": 0.0, "epoch": 1}, rank=0)
    assert not printed(capsys)
    progress.record({"loss": 6.0, "epoch": 0}, rank=1)
    assert not printed(capsys)
    progress.record({"loss": 0.5, "epoch": 1}, rank=1)
    assert printed(capsys) == "epoch 1/2  loss 3.0000\n"
    progress.close()
    assert printed(capsys) == "epoch 2/2  loss 0.2500\n"


def test_a_rank_that_reports_no_more_holds_no_line_back_for_more_than_an_epoch(progress, capsys):
    train_an_epoch(progress)
    progress.record({"loss": 0.5, "epoch": 1}, rank=0)
    progress.close()
    assert printed(capsys) == "epoch 1/2  loss 1.5000\nepoch 2/2  loss 0.5000\n"


def test_without_a_loss_there_is_no_line(progress, capsys):
    progress.position(place(0, 1))
    progress.record({"head_loss": 1.0, "epoch": 0})
    progress.position(place(1, 3))
    progress.close()
    assert not printed(capsys)


def test_on_a_terminal_a_run_says_where_it_is_and_whether_it_is_new(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DDP_PROGRESS", "bar")
    say_place(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000040.pt").touch()
    say_place(tmp_path)
    assert capsys.readouterr().err.splitlines() == [
        f"The run in {tmp_path} is new.",
        f"The run in {tmp_path} goes on from step 40.",
    ]
    monkeypatch.setenv("DDP_PROGRESS", "off")
    say_place(tmp_path)
    assert not capsys.readouterr().err
