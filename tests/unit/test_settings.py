"""Settings: defaults, preset, earlier run and SET; whatever is typed is a value or one `Error`."""

import json
import math
import os
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as how
from hypothesis import strategies as st

from dask_ranks.clusters.connect import describe
from dask_ranks.clusters.profiles import number_of_workers
from dask_ranks.run.recorder import describe as describe_run
from ddp_common import Error
from tutorials.kit import launch_options, parameters, settings

DEFAULTS = dict(epochs=3, learning_rate=1e-3, shuffle=True, name="small")
PRESETS = {"full": dict(epochs=25, name="large")}


def outcome(monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    return vars(settings("demo", presets=PRESETS, **DEFAULTS))


def run_with(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def run_of(tmp_path, **values):
    return run_with(tmp_path, json.dumps({"tutorial": "demo", "settings": values}))


def refusal(monkeypatch, **environment):
    with pytest.raises(Error) as caught:
        outcome(monkeypatch, **environment)
    return str(caught.value)


def test_set_overrides_single_values_in_the_type_of_the_default(monkeypatch):
    assert outcome(monkeypatch) == DEFAULTS
    values = outcome(monkeypatch, SET="epochs=1_000 learning_rate=2 shuffle=no name='two words'")
    assert values == dict(epochs=1000, learning_rate=2.0, shuffle=False, name="two words")
    assert [type(value) for value in values.values()] == [int, float, bool, str]


def test_what_differs_from_the_run_that_goes_on_is_known(monkeypatch, tmp_path):
    run = run_of(tmp_path, epochs=7, learning_rate=0.1)
    outcome(monkeypatch, RESUME=run, SET="epochs=7 learning_rate=0.2 shuffle=no")
    assert parameters.chosen.changed == {"learning_rate": (0.1, 0.2)}
    monkeypatch.delenv("RESUME")
    outcome(monkeypatch)
    assert parameters.chosen.changed == {}


def test_a_launch_is_told_the_folder_the_settings_and_how_the_command_was_given(
    monkeypatch, tmp_path
):
    values = outcome(monkeypatch, SET="epochs=2", CLUSTER="slurm", OPTIONS="queue=a", WORKERS="3")
    told = launch_options()
    assert told["run_name"] == "demo" and told["directory"] is None
    assert told["run_config"] == {
        "tutorial": "demo",
        "settings": values,
        "command": {"CLUSTER": "slurm", "OPTIONS": "queue=a", "WORKERS": "3"},
        "preset": "laptop",
    }
    run = run_of(tmp_path, **values)
    outcome(monkeypatch, RESUME=run)
    assert launch_options()["directory"] == str(run)


def trained(run, epochs, log):
    lines = [json.dumps({"rank": 0, "epoch": epoch, "loss": 1.0}) for epoch in range(epochs)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "log.txt").write_text(log)


@pytest.mark.parametrize(
    ("log", "change", "is_refused"),
    [
        ("10:00:00 finished: 2 rank(s), 3.0 s\n", "epochs=2", True),
        ("10:00:00 finished: 2 rank(s), 3.0 s\n", "learning_rate=2", True),
        ("10:00:00 finished: 2 rank(s), 3.0 s\n", "learning_rate=2 epochs=5", False),
        ("10:00:00 finished: 2 rank(s), 3.0 s\n", "", False),
        ("10:00:00 interrupted from the keyboard\n", "epochs=3", True),
        ("10:00:00 interrupted from the keyboard\n", "learning_rate=2", False),
    ],
)
def test_changes_to_a_run_of_which_nothing_is_left_to_train_are_refused(
    monkeypatch, tmp_path, log, change, is_refused
):
    run = run_of(tmp_path, **dict(DEFAULTS, epochs=4))
    trained(run, 4, log)  # the fourth epoch has begun at least
    outcome(monkeypatch, RESUME=run, SET=change)  # without a checkpoint: another message follows
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-00000004.pt").touch()
    if is_refused:
        words = refusal(monkeypatch, RESUME=run, SET=change)
        assert "has trained" in words and 'such as SET="epochs=' in words
    else:
        outcome(monkeypatch, RESUME=run, SET=change)


def test_set_wins_over_preset_and_preset_over_resume(monkeypatch, tmp_path):
    run = run_of(tmp_path, epochs=7, name="saved", shuffle=False)
    values = outcome(monkeypatch, RESUME=run, PRESET="full", SET="epochs=1")
    assert values == dict(epochs=1, learning_rate=1e-3, shuffle=False, name="large")


@pytest.mark.parametrize(
    ("variable", "text", "known"), [("SET", "epoch=1", DEFAULTS), ("PRESET", "huge", PRESETS)]
)
def test_an_unknown_name_lists_those_that_exist(monkeypatch, variable, text, known):
    message = refusal(monkeypatch, **{variable: text})
    assert text.partition("=")[0] in message
    assert all(name in message for name in known)


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("epochs=1.5", "whole number"),
        ("learning_rate=fast", "a number"),
        ("shuffle=perhaps", "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_type_that_is_wanted(
    monkeypatch, word, wanted
):
    message = refusal(monkeypatch, SET=word)
    assert wanted in message and word.partition("=")[0] in message


@pytest.mark.parametrize("text", ['{"settings": {"epochs"', '{"settings": 3}'])
def test_resume_with_a_damaged_config_names_the_file(monkeypatch, tmp_path, text):
    assert "config.json" in refusal(monkeypatch, RESUME=run_with(tmp_path, text))


def test_a_run_is_described_where_there_is_no_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_run(tmp_path, {}, [], None)["git"] is None


# Whatever is typed

# What the environment can hold, with a liking for what means something to a shell, to YAML, or to
# a number.
typed = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
        st.sampled_from("=.'\"\\ []{}:-#&*!|>%@`$,~/?0123456789eE+_\n"),
    ),
    max_size=40,
)
NUMBERS = ["", "0", "-1", "1e9", "1_0", "nan", "-inf", "1e400", "9" * 5000, "०", " 1", ".inf"]
numbers = st.one_of(st.integers().map(str), st.floats().map(str), st.sampled_from(NUMBERS))
YAML = ["[1", "{a: 1", "!!python/object/apply:os.system [true]", "!!int x", "&a [*a]", "{[1]: 2}"]
YAML += ["2026-99-99", "[" * 3000, "12:00:00", "? x", "a: b: c", "\t", "{<<: 1}"]
yaml_like = st.one_of(numbers, typed, st.sampled_from(YAML))


FEW = how(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
ALL_KINDS = dict(DEFAULTS, seed=0, held_out=0.15, layers=2)
LIMITS = {"held_out": (0.01, 0.45), "layers": (None, 16)}


def pairs(names, values):
    """Text such as 'epochs=3 name=x', of these names and others."""
    word = st.one_of(
        typed, st.tuples(st.one_of(st.sampled_from(names), typed), values).map("=".join)
    )
    return st.lists(word, max_size=3).map(" ".join)


def value_or_error(ask, *arguments):
    try:
        return ask(*arguments)
    except Error as error:
        said = str(error)
        assert said and "Traceback" not in said
        return None


@FEW
@given(pairs(sorted(ALL_KINDS), numbers))
@example("seed=99999999999999999999")
@example("learning_rate=1e-400")
def test_any_text_in_set_gives_settings_within_their_limits_or_an_error(text):
    with mock.patch.dict(os.environ, SET=text):
        values = value_or_error(lambda: settings("demo", limits=LIMITS, **ALL_KINDS))
    if values is not None:
        assert {name: type(value) for name, value in vars(values).items()} == {
            name: type(value) for name, value in ALL_KINDS.items()
        }
        assert (
            1 <= values.epochs <= 10**12
            and 0 <= values.seed <= 10**12
            and 1 <= values.layers <= 16
        )
        assert (
            math.isfinite(values.learning_rate)
            and values.learning_rate > 0
            and 0.01 <= values.held_out <= 0.45
        )


OPTION_NAMES = ["workers", "timeout", "cores", "memory", "walltime", "cores.x", ".", "a..b"]
OPTION_NAMES += ["scheduler_options.interface", "job_script_prologue", "worker_extra_args"]


@FEW
@given(st.sampled_from(["local", "slurm", "pbs"]), pairs(OPTION_NAMES, yaml_like), numbers)
@example("slurm", "scheduler_options=3", "1")
@example("slurm", "job_script_prologue=3", "1")
@example("pbs", "worker_extra_args=3", "1")
def test_any_text_in_options_and_workers_can_be_shown_or_is_refused(name, text, workers):
    with mock.patch.dict(os.environ, OPTIONS=text):
        value_or_error(describe, name, workers)


@FEW
@given(st.one_of(typed, numbers))
def test_any_text_in_workers_gives_a_number_or_an_error(text):
    count = value_or_error(number_of_workers, text)
    assert count is None or count >= 1
