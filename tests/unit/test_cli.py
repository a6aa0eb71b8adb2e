"""The command line as a person uses it: what it prints, what it leaves, how it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from children import command_line

from ddp_common.commands.run import has_finished

ROOT = Path(__file__).parents[2]
QUICK = "epochs=1 hidden=16 batch_size=4096"


def command(*words, runs, **variables):
    kept = {
        key: value
        for key, value in os.environ.items()
        if key
        not in (
            "CLUSTER",
            "WORKERS",
            "PRESET",
            "SET",
            "RESUME",
            "CHECKPOINT",
            "OPTIONS",
            "RESTARTS",
            "TUTORIAL",
            "DDP_PROGRESS",
        )
    }
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_common", *words],
        cwd=ROOT,
        env=kept | {"RUNS": str(runs)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Exit code and outputs of `process`; fails the test if anything it started outlives it."""
    out, error = process.communicate(timeout=180)
    deadline = time.monotonic() + 60
    while left := session_of(process.pid):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    return process.returncode, out, error


def session_of(leader):
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == leader:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


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
    for words in (
        "2 ranks",
        "epoch 1/1  loss",
        "samples/s",
        "Invented:",
        "Run directory:",
        directory.name,
    ):
        assert words in out
    assert error == ""


def test_run_directory_holds_config_metrics_checkpoints_log_and_picture(short_run):
    *_, directory = short_run
    config = json.loads((directory / "config.json").read_text())
    assert (
        config["settings"]["hidden"] == 16
        and config["versions"]["torch"]
        and len(config["workers"]) == 2
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert {row["rank"] for row in rows} == {0, 1} and all("loss" in row for row in rows)
    assert list((directory / "checkpoints").glob("step-*.pt"))
    assert "rank 0 started" in (directory / "log.txt").read_text()
    assert (directory / "loss.png").stat().st_size > 1_000 and (directory / "names.txt").exists()


def test_resume_takes_the_settings_of_the_run_and_goes_on(short_run):
    *_, directory = short_run
    (checkpoint,) = (directory / "checkpoints").iterdir()
    code, out, error = finish(
        command(
            "run",
            "pets",
            runs=directory.parents[1],
            RESUME=str(directory),
            SET="epochs=2",
            WORKERS="1",
        )
    )
    assert code == 0, error
    assert (
        f"it goes on from step 25, in epoch 1 ({checkpoint.name}), where its training had "
        "finished\n"
        "pets: changed since then: epochs=2 (was 1)\n"
    ) in out
    config = json.loads((directory / "config.json").read_text())
    assert config["settings"]["hidden"] == 16 and config["settings"]["epochs"] == 2
    assert [earlier["settings"]["epochs"] for earlier in config["earlier"]] == [1]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    epochs = [row["epoch"] for row in rows if row["rank"] == 0]
    assert epochs == sorted(epochs) and set(epochs) == {0, 1}
    assert "Resumed from step-" in (directory / "log.txt").read_text()


@pytest.mark.parametrize(
    "lines, finished",
    [
        (["rank 0 started", "[rank 0] 1 step", "finished: 2 rank(s), 1.7 s"], True),
        (["finished: 2 rank(s), 1.7 s", "rank 0 started", "rank 0 failed"], True),
        (
            [
                "finished: 2 rank(s), 1.7 s",
                "[rank 0] Resumed from step-00000025.0123456789abcdef.pt",
            ],
            False,
        ),
        (["finished: 2 rank(s), 1.7 s", "2 ranks of torchrun; rank 0 is process 1 on n"], False),
        (["[rank 0] finished: 2 rank(s)"], False),
        ([], False),
    ],
)
def test_whether_the_training_of_a_run_has_finished_stands_in_its_log(tmp_path, lines, finished):
    (tmp_path / "log.txt").write_text("".join(f"12:00:00 {line}\n" for line in lines))
    assert has_finished(tmp_path / "log.txt") is finished
    assert not has_finished(tmp_path / "none.txt")


def test_a_resume_with_settings_that_do_not_fit_fails_and_leaves_config_json_as_it_was(short_run):
    *_, directory = short_run
    before = (directory / "config.json").read_bytes()
    code, out, error = finish(
        command(
            "run",
            "pets",
            runs=directory.parents[1],
            RESUME=str(directory),
            SET="hidden=8",
            WORKERS="1",
            RESTARTS="1",
        )
    )
    assert code == 1 and error.count("was written by another model") == 1
    assert "changed since then: hidden=8 (was 16)" in out
    assert "ranks/process.py" not in error and ", in train\n" in error
    assert (directory / "config.json").read_bytes() == before


@pytest.mark.parametrize("variable", ["RESUME", "CHECKPOINT"])
@pytest.mark.parametrize("cluster", ["local", "torchrun"])
def test_a_run_of_another_tutorial_is_refused_before_anything_is_started_or_written(
    short_run, variable, cluster
):
    *_, directory = short_run
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    code, out, error = finish(
        command(
            "run",
            "mnist",
            runs=directory.parents[1],
            CLUSTER=cluster,
            **{variable: str(directory)},
        )
    )
    assert code == 1 and f"{variable}={directory}: that is a run of pets, not of mnist" in error
    assert (
        f"make run TUTORIAL=pets {variable}=" in error
        and "TUTORIAL=mnist" not in error
        and out == ""
    )
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


@pytest.mark.parametrize("variable", ["RESUME", "CHECKPOINT"])
def test_so_is_a_run_of_a_program_of_ones_own(tmp_path, variable):
    (tmp_path / "config.json").write_text('{"tutorial": null, "settings": {}, "function": "fit"}')
    code, out, error = finish(command("run", "pets", runs=tmp_path, **{variable: str(tmp_path)}))
    assert code == 1 and not out and "Traceback" not in error
    assert "that is a run of a program of your own (function fit), not of pets" in error
    assert f"launch(…, directory='{tmp_path}')" in error
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_resume_of_a_part_of_a_run_names_the_run(short_run):
    *_, directory = short_run
    for part in ("checkpoints", "checkpoints/step-00000025.pt"):
        code, _, error = finish(
            command("run", "pets", runs=directory.parents[1], RESUME=str(directory / part))
        )
        assert code == 1 and f"Name the folder of the run: {directory}." in error


def test_a_folder_of_checkpoints_without_settings_says_how_to_go_on_from_it(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000025.pt").touch()
    code, _, error = finish(command("run", "pets", runs=tmp_path / "runs", RESUME=str(tmp_path)))
    assert code == 1 and f'CHECKPOINT={tmp_path} SET="…" goes on' in error


def test_without_progress_nothing_is_announced(tmp_path):
    code, out, _ = finish(
        command("run", "pets", runs=tmp_path, DDP_PROGRESS="off", CLUSTER="tcp://127.0.0.1:1")
    )
    assert code == 1 and out == ""


@pytest.mark.parametrize("earlier", [True, False], ids=["an_earlier_one_is_good", "it_is_alone"])
def test_resume_passes_over_a_damaged_checkpoint_and_names_it(short_run, tmp_path, earlier):
    *_, directory = short_run
    copy = tmp_path / "pets" / "copy"
    shutil.copytree(directory, copy)
    good, *others = sorted((copy / "checkpoints").glob("step-*.pt"))
    for each in others:
        each.unlink()
    damaged = good.with_name(good.name.replace("step-0000", "step-0001"))
    damaged.write_bytes(good.read_bytes()[:-100])
    if not earlier:
        good.unlink()
    code, _, error = finish(command("run", "pets", runs=tmp_path, RESUME=str(copy), WORKERS="1"))
    assert damaged.name in error
    if earlier:
        assert code == 0 and good.name in (copy / "log.txt").read_text()
    else:
        assert code == 1 and "all 1 are damaged" in error


@pytest.mark.parametrize(
    "words, variables, message",
    [
        (["run", "cats"], {}, "There is no tutorial 'cats'. TUTORIAL takes one of:"),
        (["run", ""], {}, "TUTORIAL takes one of:"),
        (["run", "sync"], {}, "There is no tutorial 'sync'"),
        (["data", "cats"], {}, "There is no data set 'cats'. There is: pets"),
        (
            ["run", "pets"],
            {"CLUSTER": "mars"},
            "There is no cluster profile 'mars'. CLUSTER takes one of local",
        ),
        (["run", "pets"], {"PRESET": "huge"}, "pets has no preset 'huge'. It has: laptop, full"),
        (
            ["run", "pets"],
            {"SET": "epoch=2"},
            "pets has no setting 'epoch'. It has: data='shipped'",
        ),
        (
            ["run", "pets"],
            {"SET": "epochs=two"},
            "The setting epochs takes a whole number of at least 1, not 'two'",
        ),
        (
            ["run", "pets"],
            {"SET": "epochs=-1"},
            "The setting epochs takes a whole number of at least 1, not -1",
        ),
        (
            ["run", "pets"],
            {"SET": "epochs=0"},
            "The setting epochs takes a whole number of at least 1, not 0",
        ),
        (
            ["run", "pets"],
            {"SET": "layers=1000000000"},
            "The setting layers takes a whole number of at least 1 and at most 100",
        ),
        (
            ["run", "pets"],
            {"SET": "learning_rate=nan"},
            "The setting learning_rate takes a number above 0, not nan",
        ),
        (
            ["run", "dogs"],
            {"SET": "epochs=-1"},
            "The setting epochs takes a whole number of at least 0, not -1",
        ),
        (
            ["run", "pets"],
            {"SET": "epochs=two", "CLUSTER": "torchrun"},
            "The setting epochs takes a whole number of at least 1, not 'two'",
        ),
        (
            ["scaling", "pets"],
            {"SET": "epochs=two"},
            "The setting epochs takes a whole number of at least 1, not 'two'",
        ),
        (
            ["run", "pets"],
            {"RESTARTS": "viele"},
            "RESTARTS='viele': RESTARTS is a whole number of at least 0",
        ),
        (
            ["run", "pets"],
            {"RESTARTS": "-1", "CLUSTER": "torchrun"},
            "RESTARTS='-1': RESTARTS is a whole number of at least 0",
        ),
        (
            ["run", "pets"],
            {"WORKERS": "1e9"},
            "WORKERS=1e9: the number of workers is a whole number",
        ),
        (["run", "pets"], {"WORKERS": "99999999"}, "more than 10,000 workers are not possible"),
        (
            ["run", "pets"],
            {"OPTIONS": "processes=two", "CLUSTER": "slurm"},
            "has the option processes: 'two'; it is a whole number",
        ),
        (
            ["run", "pets"],
            {"OPTIONS": "cores.x=3", "CLUSTER": "slurm"},
            "cores.x leads into cores, which is 2",
        ),
        (["run", "pets"], {"OPTIONS": "x=[1"}, "x=[1 is no valid YAML"),
        (
            ["run", "pets"],
            {"RESUME": "/nowhere", "CHECKPOINT": "/elsewhere"},
            "RESUME=/nowhere and CHECKPOINT=/elsewhere name two folders",
        ),
        (
            ["run", "pets"],
            {"CHECKPOINT": "/dev/null"},
            "CHECKPOINT=/dev/null: /dev/null is a file, not a folder",
        ),
        (["run", "pets"], {"SET": "epochs"}, "'epochs' has no '='"),
        (
            ["run", "pets"],
            {"WORKERS": "0"},
            "WORKERS=0: the number of workers is a whole number of at least 1",
        ),
        (
            ["run", "pets"],
            {"WORKERS": "many"},
            "WORKERS=many: the number of workers is a whole number",
        ),
        (["run", "pets"], {"RESUME": "/nowhere"}, "there is no run in that folder"),
        (
            ["run", "pets"],
            {"CLUSTER": "torchrun", "GROW": "1"},
            "torchrun starts all ranks at once",
        ),
        (["run", "pets"], {"CLUSTER": "srun", "RESTARTS": "2"}, "srun starts its ranks once"),
        (["run", "pets"], {"SET": "data=/nowhere.csv"}, "There is no file /nowhere.csv"),
    ],
)
def test_bad_input_gets_one_clear_message(tmp_path, words, variables, message):
    code, out, error = finish(command(*words, runs=tmp_path, **variables))
    assert code == 1
    assert message in error and error.count("Error:") == 1
    assert "Traceback" not in out + error
    assert "starting" not in out or "/nowhere.csv" in message, "a cluster was started for nothing"
    assert not list(tmp_path.iterdir()), "something was left behind"


def test_resume_of_a_run_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code, _, error = finish(command("run", "pets", runs=tmp_path / "runs", RESUME=str(tmp_path)))
    assert code == 1 and "has no checkpoint to go on from" in error


def test_an_empty_data_file_is_refused(tmp_path):
    (tmp_path / "names.csv").touch()
    code, _, error = finish(
        command("run", "pets", runs=tmp_path / "runs", SET=f"data={tmp_path / 'names.csv'}")
    )
    assert code == 1 and "is empty" in error and "Traceback" not in error


def test_full_data_that_were_never_downloaded_name_the_command(tmp_path):
    code, _, error = finish(
        command("run", "pets", runs=tmp_path, SET="data=full", DDP_DATA=str(tmp_path))
    )
    assert code == 0 or "make data TUTORIAL=pets" in error


@pytest.mark.slow
def test_ctrl_c_stops_all_and_says_how_to_resume(tmp_path):
    process = command("run", "pets", runs=tmp_path, SET="epochs=50", WORKERS="2")
    deadline = time.monotonic() + 150
    while not list(tmp_path.glob("pets/*/checkpoints/*.pt")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the client and to every worker
    code, out, error = finish(process)
    assert code == 130
    assert "make run TUTORIAL=pets RESUME=" in error and "Traceback" not in out + error


@pytest.mark.parametrize("delay", [0.0, 0.4, 1.0])
@pytest.mark.slow
def test_ctrl_c_while_the_cluster_starts_is_heard_when_it_stands(tmp_path, delay):
    process = command("run", "pets", runs=tmp_path, SET="epochs=50", WORKERS="2")
    deadline = time.monotonic() + 150
    while not any(
        "spawn_main" in " ".join(command_line(child)) for child in children(process.pid)
    ):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    started = children(process.pid)
    code, _, error = finish(process)
    assert code == 130 and "Stopped." in error and time.monotonic() - began < 100
    assert not [
        child for child in started if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]


def children(pid):
    """Living children; none if the process has just ended."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in found if command_line(child)]


FAILS = """
import ddp_common as ddp

def train():
    raise ValueError("on purpose")

client = ddp.connect()
ddp.launch(client, train)
"""


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_command_with_its_traceback(tmp_path):
    code, _, error = finish(own_tutorial(tmp_path, FAILS))
    assert code == 1
    assert "Rank " in error and "ValueError: on purpose" in error and "/log.txt" in error


DIVERGES = """
import ddp_common as ddp

def train():
    for number in range(3):
        ddp.report(loss=1.0 if number < 1 else float("nan"))

client = ddp.connect()
run = ddp.launch(client, train)
raise RuntimeError("probability tensor contains nan")
"""


@pytest.mark.slow
def test_what_fails_because_training_diverged_says_so(tmp_path):
    code, _, error = finish(own_tutorial(tmp_path, DIVERGES))
    assert (
        code == 1
        and "Training diverged: the loss is nan" in error
        and "RuntimeError: probability tensor" in error
    )
    assert "Traceback" not in error


def own_tutorial(folder, source):
    """`run` of a tutorial with this job."""
    (folder / "mine.py").write_text("# ---\n# jupyter:\n# ---\n\n# %%" + source)
    program = (
        "import pathlib, ddp_common.commands.cli as cli; "
        f"cli.TUTORIALS = pathlib.Path({str(folder)!r}); cli.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, "run", "mine"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"RUNS": str(folder / "runs"), "WORKERS": "1"},
    )


LOSES_AN_INTERRUPT = """
import os, signal, time
import ddp_common as ddp

class Collected:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)  # the exception comes here, and is lost

def train():
    for epoch in (sampler := ddp.ElasticSampler(10_000, 1)).epochs(1):
        for batch in sampler:
            time.sleep(0.01)

client = ddp.connect()
Collected()
ddp.launch(client, train)
"""


@pytest.mark.slow
def test_ctrl_c_that_python_loses_is_heard_by_the_launch(tmp_path, monkeypatch):
    process = own_tutorial(tmp_path, LOSES_AN_INTERRUPT)
    code, _, error = finish(process)
    assert code == 130 and "Exception ignored in" in error and "Stopped." in error


def test_a_package_without_the_repository_says_where_the_tutorials_are(tmp_path):
    shutil.copytree(ROOT / "ddp_common", tmp_path / "ddp_common")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "ddp_common", "run", "pets"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "There is no tutorial here: tutorials holds none." in done.stderr
    assert "in a clone of the repository" in done.stderr and "Traceback" not in done.stderr
