"""What happens to a run directory while ranks train: it is taken, full, moved away or removed."""

import os
import sys

import cloudpickle
import faults_on_purpose as faults
import pytest
from processes import Background, has_begun, held_back, saved_steps, wait_until

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_saves_that_all_failed_are_shown_and_kept_in_the_run(client, tmp_path, capfd):
    run = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run", file_limit=2000)
    assert saved_steps(tmp_path / "run") == []
    (problem,) = run.problems
    assert "The last good one is none" in problem and "File too large" in problem
    assert "was not saved: File too large" in capfd.readouterr().err


def test_a_directory_is_of_one_launch_at_a_time_and_a_relative_one_stays_where_it_was(
    client, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with held_back(faults.train, tmp_path / "gate") as train:
        running = Background(ddp.launch, client, train, workers=2, directory="mine/run")
        wait_until(has_begun(tmp_path / "mine" / "run"))
        with pytest.raises(ddp.Error, match="(?s)is writing in .*choose another directory"):
            ddp.launch(client, faults.train, workers=2, directory="mine/run")
        os.chdir(tmp_path / "elsewhere")
    run = running.outcome()
    assert run.directory == tmp_path / "mine" / "run"
    assert len(run.records) == 28 and run.problems == []
    assert saved_steps(run.directory)
    assert list((tmp_path / "elsewhere").iterdir()) == []


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
