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

from ddp_common.commands.scaling import (
    compare,
    curve,
    in_words,
    numbers_of_ranks,
    study,
)
from ddp_common.errors import Error

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("text, ranks", [("4,2, 1", [1, 2, 4])])
def test_numbers_of_ranks_are_sorted_and_each_is_run_once(text, ranks):
    assert numbers_of_ranks(text) == ranks


@pytest.mark.parametrize("text", ["auto", "0 1"])
def test_what_is_no_list_of_numbers_of_ranks_is_refused(text):
    with pytest.raises(Error, match='such as WORKERS="1 2 4"'):
        numbers_of_ranks(text)


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


def test_throughput_leaves_out_what_lies_between_two_epochs():
    table = compare({1: frame(1.0), 2: frame(0.5)})
    assert table["samples/s"].tolist() == pytest.approx([10, 20])
    assert table["efficiency"].tolist() == pytest.approx([1, 1])


def test_runs_are_compared_after_the_samples_that_all_of_them_have_seen():
    table = compare({1: frame(1.0), 2: frame(1.0, batch=20, epochs=1)})
    assert table["samples"].tolist() == [100, 100]
    assert table["steps"].tolist() == [10, 5]


def said(frames, cores=None):
    return in_words("dogs", frames, compare(frames), cores)


def test_words_say_faster_but_not_better_when_the_loss_is_the_same():
    words = said({1: frame(1.0), 2: frame(0.55)})
    assert "on 1 and 2 ranks, compared after 200 samples" in words
    assert "2 ranks train 1.82 times as fast as 1 (ideal: 2; efficiency 0.91)" in words
    assert "a faster model, not a better one" in words


def test_words_say_that_the_training_changed_when_the_loss_differs():
    words = said({1: frame(1.0), 4: frame(1.0, batch=20, loss=1.5)})
    assert (
        "With 4 ranks the loss is 50% higher than with 1" in words
        and "it took 10 steps instead of 20" in words
    )


def test_an_evaluation_does_not_count_into_the_time_of_the_step_before_it(tmp_path):
    records = [
        {
            "rank": rank,
            "time": 100.0 + step,
            "epoch": 0,
            "step": step,
            "samples": 10 * step,
            "loss": 1.0,
        }
        for step in (1, 2, 3)
        for rank in (0, 1)
    ]
    records.append(
        {"rank": 0, "time": 160.0, "epoch": 0, "step": 3, "samples": 30, "validation_loss": 0.5}
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    rows = curve(tmp_path)
    assert rows["seconds"].tolist() == [0, 1, 2]
    assert rows["validation_loss"].iloc[-1] == 0.5


def test_after_ctrl_c_a_study_names_its_folder_and_lets_the_run_end(tmp_path):
    environment = {**os.environ, "RUNS": str(tmp_path), "DDP_PROGRESS": "off"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ddp_common", "scaling", "pets", "--set", "epochs=1000"],
        cwd=ROOT,
        env=environment,
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
    assert "Stopped" in error and "make run TUTORIAL=pets RESUME=" in error
    (folder,) = (tmp_path / "scaling" / "pets").iterdir()
    assert f"Stopped. The runs until then are in {folder}." in error
    assert "Nothing had begun" not in error


def scaling(monkeypatch, tmp_path, ranks, words):
    monkeypatch.setenv("RUNS", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "ddp_common", "scaling", "pets", "--ranks", ranks, "--set", words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done, *(tmp_path / "scaling" / "pets").glob("*")


def test_a_small_study_leaves_its_table_curves_picture_and_words(monkeypatch, tmp_path):
    done, folder = scaling(monkeypatch, tmp_path, "1 2", "epochs=1 hidden=8 batch_size=4096")
    assert done.returncode == 0, done.stderr
    assert {"scaling.csv", "curves.csv", "scaling.png", "scaling.txt", "1-ranks", "2-ranks"} == {
        path.name for path in folder.iterdir()
    }
    assert pd.read_csv(folder / "scaling.csv")["ranks"].tolist() == [1, 2]
    words = (folder / "scaling.txt").read_text().strip()
    assert words in done.stdout and "The loss is the same" in words


def test_a_study_whose_run_fails_compares_those_before_it(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$WORKERS" = 2 ] && exit 3\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SET", "epochs=1 hidden=8 batch_size=4096")
    with pytest.raises(Error, match="The run on 2 ranks ended with code 3"):
        study("pets", [1, 2, 3], lambda *_, **__: None)
    (folder,) = (tmp_path / "runs" / "scaling" / "pets").iterdir()
    assert pd.read_csv(folder / "scaling.csv")["ranks"].tolist() == [1]
    assert {"scaling.png", "scaling.txt", "1-ranks"} <= {
        path.name for path in folder.iterdir()
    } and not (folder / "3-ranks").exists()
