"""What happens to a run directory while ranks train: it is taken, full, moved away or removed."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from processes import Background, held_back, log_of, wait_until

import ddp_common as ddp
from ddp_common.ranks.checkpoint_files import checkpoints, step_of
from ddp_common.teaching import faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]


def has_begun(directory):
    metrics = directory / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.stat().st_size > 0


def test_two_launches_in_one_directory_at_once_are_refused_and_the_first_is_not_disturbed(
    client, tmp_path
):
    with held_back(faults.train, tmp_path / "gate") as train:
        first = Background(ddp.launch, client, train, workers=2, directory=tmp_path / "run")
        wait_until(has_begun(tmp_path / "run"))
        with pytest.raises(ddp.Error, match="is writing in .*choose another directory"):
            ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run")
    run = first.outcome()
    assert len(run.records) == 28 and run.problems == []
    assert ddp.launch(client, ddp.world_size, workers=2, directory=tmp_path / "run").result == 2


def test_after_a_failure_the_directory_is_free_at_once(client, tmp_path):
    with pytest.raises(ddp.RankFailed):
        ddp.launch(
            client, faults.inject(faults.train, "raise"), workers=2, directory=tmp_path / "run"
        )
    assert ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run").world_size == 2


def test_saves_that_all_failed_are_shown_and_kept_in_the_run(client, tmp_path, capfd):
    run = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run", file_limit=2000)
    assert checkpoints(tmp_path / "run" / "checkpoints") == []
    (problem,) = run.problems
    assert re.match(
        r"No checkpoint was saved, of 5\. The last failure: .*File too large\. "
        "The last good one is none",
        problem,
    )
    assert capfd.readouterr().err.count("was not saved: File too large") == 1


@pytest.mark.parametrize("cluster", ["local", "torchrun"])
def test_make_run_on_a_full_disk_says_in_its_closing_line_that_nothing_was_saved(
    small_disk, cluster
):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(470_000))  # the rest is enough for the numbers, not for the picture
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ddp_common",
            "run",
            "pets",
            "--cluster",
            cluster,
            "--workers",
            "2",
            "--checkpoint",
            small_disk / "run",
            "--set",
            "epochs=1 hidden=64 batch_size=4096",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    closing = done.stdout.partition("Done in")[2]
    assert "Training finished, but not without problems:" in closing
    assert "No checkpoint was saved" in closing and "No space left on device" in closing
    assert "The file loss.png was not saved" in closing
    assert "was not saved: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in (small_disk / "run").glob("*loss*")) == []


def test_a_relative_directory_means_the_place_it_had_when_launch_was_called(
    client, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with held_back(faults.train, tmp_path / "gate") as train:
        running = Background(ddp.launch, client, train, workers=2, directory="mine/run")
        wait_until(has_begun(tmp_path / "mine" / "run"))
        os.chdir(tmp_path / "elsewhere")
    run = running.outcome()
    assert run.directory == tmp_path / "mine" / "run"
    assert checkpoints(run.directory / "checkpoints")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_relative_runs_and_resume_are_settled_when_they_are_read(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNS", "runs")
    first = ddp.launch(client, faults.train, workers=2)
    assert first.directory.is_absolute() and first.directory.is_relative_to(tmp_path / "runs")
    monkeypatch.setenv("RESUME", os.path.relpath(first.directory))
    ddp.settings("demo")
    monkeypatch.chdir("/")
    assert ddp.launch(client, faults.train, workers=2).directory == first.directory


def remove_and_die(folder):
    while os.path.exists(folder):  # a save that has begun may make a file meanwhile
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_its_checkpoints_folder_a_killed_run_restarts_and_the_cause_is_named(
    client, tmp_path
):
    undisturbed = ddp.launch(client, faults.train, workers=2).result
    strike = functools.partial(remove_and_die, tmp_path / "run" / "checkpoints")
    run = ddp.launch(
        client,
        faults.inject(faults.train, strike, mark=tmp_path / "mark"),
        workers=2,
        restarts=1,
        directory=tmp_path / "run",
        pause=0.1,
    )
    assert torch.equal(run.result, undisturbed)
    assert [failure.signal for failure in run.failures] == ["SIGKILL"]
    strike = functools.partial(remove_and_die, tmp_path / "second" / "checkpoints")
    with pytest.raises(ddp.RankFailed, match="killed by SIGKILL"):
        ddp.launch(
            client,
            faults.inject(faults.train, strike),
            workers=2,
            directory=tmp_path / "second",
            pause=0.1,
        )


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_run_directory_that_vanishes_is_made_again_with_all_metrics_and_somebody_is_told(
    client, tmp_path, capfd, how
):
    directory = tmp_path / "run"
    # after the gate it takes 5 s more: the client looks every 2 s whether the folder is there
    with held_back(faults.train, tmp_path / "gate", step=4) as train:
        running = Background(ddp.launch, client, train, workers=2, directory=directory, pause=0.5)
        wait_until(has_begun(directory))
        if how == "removed":
            shutil.rmtree(directory)
        else:
            directory.rename(tmp_path / "moved")
    run = running.outcome()
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == len(run.records) == 28
    log = log_of(directory)
    assert "was removed while the run was writing there" in log and "finished: 2 rank(s)" in log
    assert json.loads((directory / "config.json").read_text())["workers"]
    assert step_of(checkpoints(directory / "checkpoints")[-1]) == 14
    assert "was removed while the run was writing there" in run.problems[0]
    assert capfd.readouterr().err.count("was removed while the run was writing there") == 1
    assert oct(directory.stat().st_mode & 0o777) == oct(0o700)


def test_new_run_directories_are_for_their_owner_alone_and_old_ones_stay_as_they_are(
    client, tmp_path
):
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared" / "old").mkdir(mode=0o750)
    modes = {}
    for place in ("new/below/run", "shared/new", "shared/old"):
        run = ddp.launch(client, ddp.rank, workers=1, directory=tmp_path / place)
        modes[place] = oct(run.directory.stat().st_mode & 0o777)
    assert modes == {"new/below/run": "0o700", "shared/new": "0o700", "shared/old": "0o750"}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755
    run = ddp.launch(client, ddp.rank, workers=1)  # below RUNS
    made = (run.directory, run.directory.parent, run.directory.parent.parent)
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3


def test_the_log_tells_a_failure_as_a_person_reads_it(client):
    class EnoughIsEnough(Exception):
        pass

    def train():
        raise EnoughIsEnough("the loss does not fall any more")

    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, train, workers=1)
    log = log_of(caught.value.directory)
    lines = log.splitlines()
    (first,) = [number for number, line in enumerate(lines) if "rank 0 failed: " in line]
    assert "EnoughIsEnough: the loss does not fall any more" in lines[first]
    assert lines[first + 1] == "Traceback (most recent call last):"
    assert "\\n" not in log and "{" not in log
    assert '    raise EnoughIsEnough("the loss does not fall any more")' in lines[first + 1 :]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGKILL", "rank 1 was killed by SIGKILL"),
        ("sys.exit(3)", "rank 1 failed: it left with exit code 3"),
        ("os._exit(0)", "rank 1 left with exit code 0"),
    ],
)
def test_the_log_tells_other_ends_too(client, how, words):
    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, faults.inject(faults.train, how), workers=2)
    assert words in log_of(caught.value.directory)


def test_a_file_that_could_not_be_written_on_the_client_is_a_problem_and_no_failure(
    client, tmp_path
):
    (tmp_path / "run" / "a_folder").mkdir(parents=True)

    def train():
        ddp.save_file("a_folder", b"x")
        ddp.save_file("good", b"x")
        return 1

    run = ddp.launch(client, train, workers=1, directory=tmp_path / "run")
    assert run.result == 1 and (run.directory / "good").exists()
    assert "a_folder cannot be written" in run.problems[0]
