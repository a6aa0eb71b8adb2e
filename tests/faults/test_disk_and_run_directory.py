"""What happens to a run directory while ranks train: it is taken, full, moved away or removed."""

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import faults_on_purpose as faults
import pytest
from patience import PATIENCE
from processes import Background, has_begun, held_back, saved_steps, wait_until

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]


def test_make_run_on_a_full_disk_says_in_its_closing_line_that_nothing_was_saved(small_disk):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(470_000))  # the rest is enough for the numbers, not for the picture
    run = {"WORKERS": "2", "CHECKPOINT": str(small_disk / "run")}
    settings = {**run, "SET": "epochs=1 hidden=64 batch_size=256"}
    done = subprocess.run(
        [sys.executable, "-m", "tutorials", "run", "pets"],
        env={**os.environ, **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    closing = done.stdout.partition("Done in")[2]
    assert "Training finished, but not without problems:" in closing
    assert "The last good one is none" in closing and "No space left on device" in closing
    assert "Traceback" not in done.stderr


def remove_and_die(folder):
    while os.path.exists(folder):  # a save that has begun may make a file meanwhile
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_whose_folder_was_removed_is_not_started_again_and_says_why(client, tmp_path):
    strike = functools.partial(remove_and_die, tmp_path / "run")
    train = ddp.inject(faults.train, strike, mark=tmp_path / "mark")
    with pytest.raises(ddp.Error) as caught:
        ddp.launch(client, train, workers=2, restarts=1, directory=tmp_path / "run", pause=0.1)
    words = f"{tmp_path / 'run'} cannot be written: No such file"
    assert words in str(caught.value) and "SIGKILL" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_vanishes_ends_nothing_and_the_run_says_so(client, tmp_path, capfd):
    directory = tmp_path / "run"
    with held_back(faults.train, tmp_path / "gate", step=4) as train:
        running = Background(ddp.launch, client, train, workers=2, directory=directory, pause=0.5)
        wait_until(has_begun(directory))
        shutil.rmtree(directory)
    run = running.outcome()
    assert len(run.records) == 28 and run.result is not None
    said = f"{directory / 'log.txt'} cannot be written: No such file"
    assert said in "".join(run.problems) and said in capfd.readouterr().err
    assert saved_steps(directory)[-1] == 14
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 28
