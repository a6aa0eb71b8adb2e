"""The scaling study: which numbers of ranks, what it says, what a run that fails leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import scaling

from ddp_common.errors import Error

ROOT = Path(__file__).parents[2]


def test_numbers_of_ranks_are_sorted_and_each_is_run_once():
    assert scaling.numbers_of_ranks("4,2, 1 2") == [1, 2, 4]
    with pytest.raises(Error, match='such as WORKERS="1 2 4"'):
        scaling.numbers_of_ranks("0 1")


def frame(step_seconds, batch=10, loss=1.0, epochs=2, samples=100):
    """A run of steps that take so long each, with ten seconds between two epochs."""
    steps = samples // batch
    return pd.DataFrame(
        [
            {
                "step": epoch * steps + step + 1,
                "epoch": epoch,
                "samples": epoch * samples + (step + 1) * batch,
                "seconds": (epoch * steps + step) * step_seconds + 10 * epoch,
                "loss": loss,
            }
            for epoch in range(epochs)
            for step in range(steps)
        ]
    )


def test_runs_are_compared_after_the_samples_that_all_of_them_have_seen():
    table = scaling.compare({1: frame(1.0), 2: frame(1.0, batch=20, epochs=1)})
    assert table["samples"].tolist() == [100, 100]
    assert table["steps"].tolist() == [10, 5]


def test_words_say_how_much_faster_it_was_and_whether_the_model_is_another():
    table = scaling.compare({1: frame(1.0), 2: frame(0.5), 4: frame(0.5, batch=20, loss=1.5)})
    assert table["samples/s"].tolist() == pytest.approx([10, 20, 40])  # without the pauses
    words = scaling.in_words("dogs", table, cores=2)
    assert (
        "In these runs 2 ranks train 2.00 times as fast as 1 (ideal: 2; efficiency 1.00)" in words
    )
    assert "with 4 ranks, after 10 steps, it is 50.0% higher than with 1 after 20" in words
    assert "Their training is another one" in words
    assert "whether another seed gives the same difference is not known" in words
    assert "There are 2 cores here" in words
    assert "The global batch has not grown" in scaling.in_words("dogs", table[:2], cores=2)


def test_amdahls_law_comes_back_from_speeds_that_follow_it():
    times = {ranks: 0.9 / ranks + 0.1 for ranks in (1, 2, 4)}  # a tenth is not shared out
    frames = {ranks: frame(seconds) for ranks, seconds in times.items()}
    words = scaling.in_words("dogs", scaling.compare(frames), cores=None)
    assert "10% of the time on one rank is not shared out" in words
    assert "misses the measured times by up to 0%." in words
    assert (
        f"On 8 ranks that each have a core or GPU of their own, it says {1 / 0.2125:.2f}" in words
    )


def test_an_evaluation_does_not_count_into_the_time_of_the_step_before_it(tmp_path):
    records = [
        {"rank": rank, "time": 100.0 + step, "epoch": 0, "step": step, "loss": 1.0}
        for step in (1, 2, 3)
        for rank in (0, 1)
    ]
    records[-1]["loss"] = "nan"  # as the file has it
    records.append({"rank": 0, "time": 160.0, "epoch": 0, "step": 3, "validation_loss": 0.5})
    lines = [json.dumps({**record, "samples": 10 * record["step"]}) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    rows = scaling.curve(tmp_path)
    assert rows["seconds"].tolist() == [0, 1, 2]
    assert rows["loss"].tolist() == [1, 1, 1]
    assert rows["validation_loss"].iloc[-1] == 0.5


def test_after_ctrl_c_a_study_lets_the_run_end_and_names_its_folder(tmp_path):
    chosen = {"TUTORIAL": "pets", "SET": "epochs=1000", "RUNS": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "tutorials/scaling.py"],
        cwd=ROOT,
        env={**os.environ, **chosen, "DDP_PROGRESS": "off"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 240
    while not list(tmp_path.rglob("step-*.pt")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in error
    assert "make run TUTORIAL=pets RESUME=" in error
    (folder,) = (tmp_path / "scaling" / "pets").iterdir()
    assert f"The run in {folder}/1-ranks was not finished (exit code 130)" in error


def test_a_study_compares_the_runs_before_one_that_fails(monkeypatch, tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$WORKERS" = 3 ] && exit 3\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SET", "epochs=1 hidden=8 batch_size=256")
    with pytest.raises(Error, match=r"3-ranks was not finished \(exit code 3\)"):
        scaling.study("pets", [1, 2, 3, 4])
    (folder,) = (tmp_path / "runs" / "scaling" / "pets").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        *("scaling.csv", "scaling.png", "scaling.txt", "1-ranks", "2-ranks")
    }
    assert pd.read_csv(folder / "scaling.csv")["ranks"].tolist() == [1, 2]
    words = (folder / "scaling.txt").read_text().strip()
    assert words in capsys.readouterr().out and "largest difference of the loss" in words
