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
    draw,
    in_words,
    numbers_of_ranks,
    of_equal_ranks,
    study,
)
from ddp_common.errors import Error
from ddp_common.run.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "text, ranks", [("1 2 4", [1, 2, 4]), ("4,2, 1", [1, 2, 4]), (" 2 ", [2]), ("2 2 1", [1, 2])]
)
def test_numbers_of_ranks_are_sorted_and_each_is_run_once(text, ranks):
    assert numbers_of_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "auto", "1 two", "0 1", "-1", "1.5"])
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


def test_words_admit_that_more_ranks_were_slower():
    assert "train 0.50 times as fast" in said(
        {1: frame(1.0), 2: frame(2.0)}
    ) and "neither a faster model nor" in said({1: frame(1.0), 2: frame(2.0)})


def test_words_say_that_the_training_changed_when_the_loss_differs():
    words = said({1: frame(1.0), 4: frame(1.0, batch=20, loss=1.5)})
    assert (
        "With 4 ranks the loss is 50% higher than with 1" in words
        and "it took 10 steps instead of 20" in words
    )


def test_words_call_a_difference_after_the_same_steps_no_effect_of_hardware():
    words = said({1: frame(1.0), 2: frame(0.6, loss=0.9)})
    assert (
        "With 2 ranks the loss is 10% lower than with 1: in as many steps with the same samples"
        in words
        and "instead of" not in words
    )


def test_words_say_that_ranks_shared_the_cores():
    assert "There are 2 cores here: beyond 2 ranks they share them" in said(
        {1: frame(1.0), 4: frame(1.0)}, cores=2
    )
    assert "cores" not in said({1: frame(1.0), 2: frame(1.0)}, cores=2)


def test_words_give_a_model_of_the_step_and_what_it_predicts():
    steps = {1: 0.2, 2: 0.1 + 0.01 + 0.02, 4: 0.05 + 0.015 + 0.02}
    words = said({ranks: frame(seconds) for ranks, seconds in steps.items()})
    assert "on 4 ranks, in ms, compute 50.0, transfer 15.0, latency 20.0" in words
    assert "It misses the measured steps by up to 0%" in words
    assert "On 8 ranks" in words and "it says 62.5 ms: 3.20 times as fast as 1" in words
    assert "most of that step is compute" in words
    assert "Computing that every rank repeats counts as transfer" in words


def test_words_say_that_two_numbers_of_ranks_do_not_tell_transfer_from_latency():
    words = said({1: frame(0.2), 2: frame(0.12)})
    assert "compute 100.0, transfer and latency together 20.0" in words
    assert "cannot be told from 2 numbers of ranks: measure 3" in words
    assert "it says 45.0 to 60.0 ms: 3.33 to 4.44 times as fast as 1" in words


def test_words_ask_for_one_rank_where_many_without_it_do_not_tell_the_terms_apart():
    words = said({ranks: frame(0.2 / ranks + 0.01) for ranks in (2, 4, 8)})
    assert "cannot be told from 3 numbers of ranks: measure one rank, too." in words


def test_a_batch_that_grows_with_the_ranks_is_more_to_compute():
    frames = {ranks: frame(0.1 + 0.02 * (ranks > 1), batch=10 * ranks) for ranks in (1, 2)}
    assert "compute 100.0, transfer and latency together 20.0" in said(frames)


def test_after_eight_ranks_twice_as_many_are_predicted():
    assert "On 16 ranks" in said({ranks: frame(1.0 / ranks) for ranks in (1, 2, 8)})


def test_epochs_of_one_step_have_no_speed_and_no_model():
    words = said({ranks: frame(1.0, batch=100) for ranks in (1, 2)})
    assert "more ranks gave no better model" in words and "an epoch of one step" in words
    assert "nan" not in words and "model of the step" not in words


def test_one_number_of_ranks_alone_is_no_comparison_but_no_error():
    assert said({2: frame(1.0)}) == "dogs on 2 ranks, compared after 200 samples."


def test_a_figure_is_drawn_of_runs_with_and_without_evaluations():
    with_evaluations = {
        ranks: frame(1.0).assign(validation_loss=[None] * 9 + [0.5] + [None] * 9 + [0.4])
        for ranks in (1, 4)
    }
    for frames in (with_evaluations, {1: frame(1.0), 2: frame(0.5)}):
        assert len(draw(frames, compare(frames), 2, "title").axes) == 4


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


def test_a_loss_that_is_not_finite_is_in_the_curve_as_a_number(tmp_path):
    directory = RunDirectory(tmp_path)
    for step, loss in ((1, 2.0), (2, float("inf")), (3, float("nan"))):
        position = {"time": 1.0 * step, "epoch": 0, "step": step, "samples": 10 * step}
        directory.record(0, {**position, "loss": loss, "validation_loss": float("nan")})
    directory.close()
    rows = curve(tmp_path)
    assert rows["loss"].tolist()[:2] == [2.0, float("inf")]
    table = compare({1: rows})
    assert table["loss"].isna().all() and table["validation_loss"].isna().all()


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


def test_a_run_without_a_loss_has_no_curve(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"rank": 0, "time": 1.0, "step": 1, "samples": 1})
    )
    with pytest.raises(Error, match="reported no `loss`"):
        curve(tmp_path)


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


@pytest.mark.parametrize(
    ("cluster", "options", "ranks", "becomes"),
    [
        ("local", "", [1, 2, 4], "threads_per_worker=1"),
        ("", "timeout=9", [1, 2], "timeout=9 threads_per_worker=2"),
        ("local", "threads_per_worker=3", [1, 2], "threads_per_worker=3"),
        ("slurm", "queue=a", [1, 2], "queue=a"),
    ],
)
def test_every_rank_of_a_study_has_as_many_threads(monkeypatch, cluster, options, ranks, becomes):
    monkeypatch.setenv("CLUSTER", cluster)
    monkeypatch.setattr("ddp_common.commands.scaling.available_cores", lambda: 4)
    monkeypatch.setattr("ddp_common.commands.scaling.gpus", lambda: 0)
    assert of_equal_ranks(options, ranks) == becomes


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


def test_a_study_without_a_single_run_ends_with_an_error(monkeypatch, tmp_path):
    done, *_ = scaling(monkeypatch, tmp_path, "1 2", "no_such_setting=1")
    assert (
        done.returncode != 0
        and "pets has no setting 'no_such_setting'" in done.stderr
        and "Traceback" not in done.stderr
    )
