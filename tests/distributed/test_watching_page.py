"""The page on watching: its blocks run, those of trackers where the package is installed."""

import itertools
import os
import re
import signal
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from processes import Background, rank_pids, wait_until

from ddp_common.teaching.live_plot import LivePlot

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "watching.md").read_text()
BLOCKS = re.findall(r"^```python ?(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)


def run_blocks(tracker, names):
    """Execute the blocks that belong to a tracker, or to none."""
    found = [code for name, code in BLOCKS if name == tracker]
    assert found
    for code in found:
        exec(compile(code, "docs/watching.md", "exec"), names)


@pytest.fixture(scope="module")
def page(client, tmp_path_factory):
    """What the page has defined before it comes to the trackers."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("page")
        patch.setenv("RUNS", str(folder / "runs"))
        names = {"__name__": "__main__", "client": client, "folder": folder}
        run_blocks("", names)
        yield names


def test_every_record_arrives_with_what_the_page_shows_of_it(page):
    assert page["seen"] == list(page["run"].records)
    assert len(page["seen"]) == 2 * 3 * 10
    assert set(page["seen"][0]) == {"rank", "time", "epoch", "step", "samples", "loss"}


class Shown:
    """What a notebook's `display` gives: it notes the curves that it was updated with."""

    def __init__(self):
        self.lengths = []

    def __call__(self, figure, display_id):
        assert display_id
        return self

    def update(self, figure):
        (line,) = figure.axes[0].lines
        self.lengths.append(len(line.get_xdata()))


def test_the_plot_grows_while_training_runs_and_ends_with_all_steps(page):
    shown = Shown()
    plot = LivePlot("loss", shown)
    slow = {**page["settings"], "pause": 0.3}
    run = page["ddp"].launch(page["client"], page["train"], workers=2, on_report=plot, **slow)
    before_the_end = list(shown.lengths)
    plot.draw()
    steps = len(run.metrics["step"].unique())
    assert len(before_the_end) >= 2 and before_the_end == sorted(before_the_end)
    assert before_the_end[0] < steps and shown.lengths[-1] == steps


def test_a_script_draws_no_plot(page):
    run_blocks("plot", page)
    assert page["watch"] is None


def test_tensorboard_has_one_curve_of_a_launch(page):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_blocks("tensorboard", page)
    events = accumulator.EventAccumulator(str(page["folder"] / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("loss")] == list(range(1, 31))


def test_mlflow_has_one_run_of_a_launch_with_its_settings(page):
    mlflow = pytest.importorskip("mlflow")
    run_blocks("mlflow", page)
    (kept,) = mlflow.search_runs(experiment_names=["linear"], output_format="list")
    assert kept.data.params["learning_rate"] == "0.05"
    assert kept.data.tags["run directory"] == str(page["run"].directory)
    curve = mlflow.MlflowClient().get_metric_history(kept.info.run_id, "loss")
    assert [each.step for each in curve] == list(range(1, 31))


def test_wandb_writes_an_offline_run_without_an_account(page):
    pytest.importorskip("wandb")
    run_blocks("wandb", page)
    assert list(page["folder"].glob("wandb/offline-run-*/*.wandb"))


def test_optuna_prunes_and_the_workers_are_free_again(page, monkeypatch):
    # With several jobs Optuna seeds its sampler anew for each trial, and chance may prune none
    monkeypatch.setattr(optuna.samplers.RandomSampler, "reseed_rng", lambda sampler: None)
    run_blocks("optuna", page)
    trials = page["study"].trials
    states = [trial.state for trial in trials]
    assert len(states) == 8 and TrialState.PRUNED in states
    assert TrialState.FAIL not in states
    assert any(overlap(one, other) for one, other in itertools.combinations(trials, 2))
    free = page["ddp"].launch(page["client"], lambda: "free", workers=4)
    assert free.result == "free"


def overlap(one, other):
    """Whether two trials ran at the same time."""
    return (
        one.datetime_start < other.datetime_complete
        and other.datetime_start < one.datetime_complete
    )


def test_a_search_goes_on_after_a_trial_of_which_a_rank_was_killed(page):
    runs = Path(os.environ["RUNS"])
    before = set(runs.glob("**/log.txt"))
    slow = {**page, "settings": {**page["settings"], "pause": 0.5}}
    search = Background(run_blocks, "optuna", slow)

    def ranks_of_a_trial():
        logs = set(runs.glob("**/log.txt")) - before
        return [pid for log in logs for pid in rank_pids(log.parent)]

    first, *_ = wait_until(ranks_of_a_trial)
    os.kill(first, signal.SIGKILL)
    search.outcome()
    states = [trial.state for trial in slow["study"].trials]
    assert len(states) == 8 and states.count(TrialState.FAIL) == 1
    assert TrialState.COMPLETE in states
