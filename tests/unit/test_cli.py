"""The command line as a person uses it: what it prints, what it leaves, how it refuses."""

import json
import os
import time
from unittest import mock

import pytest
from click.testing import CliRunner
from command_line import command, finish, own_tutorial, press_ctrl_c
from processes import saved_steps

from tutorials.kit import cli
from tutorials.kit.run import resume_hint

QUICK = "epochs=1 hidden=16 batch_size=256"


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """One real, short training: its output and its run directory."""
    runs = tmp_path_factory.mktemp("runs")
    code, out, error = finish(command("run", "pets", runs=runs, SET=QUICK, WORKERS="2"))
    assert code == 0, error
    (directory,) = (runs / "pets").iterdir()
    return out, error, directory


def test_run_shows_progress_names_and_where_the_run_is(short_run):
    out, error, directory = short_run
    assert out.startswith("pets: starting 2 workers on this machine\n")
    for words in ("2 ranks", "names at 0.8:", directory.name):
        assert words in out
    begins, line = error.splitlines()
    assert begins == f"The run begins on 2 rank(s), in {directory}"
    assert line.startswith("1 of 1 epochs  loss ")


def test_run_directory_holds_config_metrics_checkpoints_log_and_picture(short_run):
    *_, directory = short_run
    config = json.loads((directory / "config.json").read_text())
    assert config["settings"]["hidden"] == 16 and config["versions"]["torch"]
    assert len(config["workers"]) == 2
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert {row["rank"] for row in rows} == {0, 1} and all("loss" in row for row in rows)
    assert list((directory / "checkpoints").glob("step-*.pt"))
    assert "rank 0 started" in (directory / "log.txt").read_text()
    assert (directory / "loss.png").stat().st_size > 1_000 and (directory / "names.txt").exists()


def interrupted(process, directory, step, times=1):
    """What a training says that Ctrl-C has ended, so many times, once it has saved this step."""
    while max(saved_steps(directory), default=0) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    press_ctrl_c(process, times)
    code, out, error = finish(process)
    assert code == 130 and "Traceback" not in out + error and error.count("Stopped.") == 1
    return out, error


def test_resume_goes_on_with_the_settings_of_the_run_until_ctrl_c_stops_all(tmp_path):
    directory = tmp_path / "run"
    long = f"{QUICK} epochs=1000"
    begun = command("run", "pets", runs=tmp_path, SET=long, CHECKPOINT=directory, WORKERS="2")
    interrupted(begun, directory, step=25)
    saved = max(saved_steps(directory))
    process = command("run", "pets", runs=tmp_path, RESUME=directory, WORKERS="1")
    out, error = interrupted(process, directory, step=saved + 75, times=4)
    assert f"\n  make run TUTORIAL=pets RESUME={directory} WORKERS=1\n" in error
    assert f"it goes on from step {saved} (step-{saved:08d}." in out
    config = json.loads((directory / "config.json").read_text())
    assert config["settings"]["hidden"] == 16 and config["settings"]["epochs"] == 1000
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    epochs = [row["epoch"] for row in rows if row["rank"] == 0]
    assert epochs == sorted(epochs) and epochs[-1] > 1


def test_a_resume_says_which_settings_were_changed(tmp_path, joining):
    directory = tmp_path / "run"
    for variables in (
        {"CHECKPOINT": directory, "SET": "epochs=1 hidden=16"},
        {"RESUME": directory, "SET": "epochs=2"},
    ):
        variables |= {"WORKERS": "1"} | joining
        code, out, error = finish(command("run", "mnist", runs=tmp_path, **variables))
        assert code == 0, error
    assert "changed since then: epochs=2 (was 1)" in out
    config = json.loads((directory / "config.json").read_text())
    assert config["settings"]["hidden"] == 16 and config["settings"]["epochs"] == 2


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """What a command that is refused at once says. It has started and left nothing."""
    runs = tmp_path / "empty"
    monkeypatch.setenv("RUNS", str(runs))

    def call(*words, **variables):
        with mock.patch.dict(os.environ, variables):
            done = CliRunner().invoke(cli.main, words)
        assert done.exit_code == 1 and "Traceback" not in done.output
        assert done.output.count("Error:") == 1 and "starting" not in done.output
        assert not runs.exists(), "something was left behind"
        return done.output

    return call


@pytest.mark.parametrize(
    "words, variables, message",
    [
        ("run cats", {}, "There is no tutorial 'cats'. TUTORIAL takes one of:"),
        ("run pets", {"CLUSTER": "mars"}, "There is no cluster profile 'mars'"),
        ("run pets", {"CLUSTER": "mine.yaml"}, "/mine.yaml. CLUSTER takes one of"),
        ("run pets", {"SET": "epoch=2"}, "pets has no setting 'epoch'. It has: data='shipped'"),
        ("run pets", {"OPTIONS": "timeout=[1"}, "timeout takes a number of at least 0"),
        ("run pets", {"WORKERS": "0"}, "WORKERS is a whole number of at least 1"),
        ("run pets", {"RESUME": "/nowhere"}, "there is no run in that folder"),
        ("run pets", {"CLUSTER": "torchrun", "RESTARTS": "-1"}, "RESTARTS is a whole number"),
    ],
    ids=["tutorial", "cluster", "file", "setting", "options", "workers", "resume", "restarts"],
)
def test_bad_input_gets_one_clear_message(refusal, words, variables, message):
    assert message in refusal(*words.split(), **variables)


def test_resume_of_a_run_of_another_tutorial_is_refused(refusal, tmp_path):
    (tmp_path / "config.json").write_text('{"tutorial": "pets", "settings": {}}')
    said = refusal("run", "mnist", RESUME=str(tmp_path))
    assert f"RESUME={tmp_path}: that is a run of pets, not of mnist" in said
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_line_to_go_on_with_keeps_where_and_how_a_run_was_started(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000002.pt").touch()
    started = {"CLUSTER": "slurm", "OPTIONS": "queue=gpu walltime=02:00:00", "RESTARTS": "3"}
    (tmp_path / "config.json").write_text(json.dumps({"tutorial": "pets", "command": started}))
    said = resume_hint("pets", tmp_path)
    line = "CLUSTER=slurm OPTIONS='queue=gpu walltime=02:00:00' RESTARTS=3"
    assert said.endswith(f"\n  make run TUTORIAL=pets RESUME={tmp_path} {line}")
    (tmp_path / "config.json").write_text("damaged")
    assert resume_hint("pets", tmp_path).endswith(f"RESUME={tmp_path}")


FAILS = """
import ddp_common as ddp

def train():
    raise ValueError("on purpose")

client = ddp.connect()
ddp.launch(client, train)
"""


def test_a_rank_that_fails_ends_the_command_with_its_traceback(tmp_path):
    code, _, error = finish(own_tutorial(tmp_path, FAILS))
    assert code == 1
    assert "Rank " in error and "ValueError: on purpose" in error and "/log.txt" in error
