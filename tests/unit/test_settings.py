"""Settings of a tutorial: defaults, preset, earlier run, SET; and what is refused."""

import json

import pytest

from ddp_common import Error, settings
from ddp_common.run.config import current

DEFAULTS = dict(epochs=3, learning_rate=1e-3, shuffle=True, name="small")
PRESETS = {"full": dict(epochs=25, name="large")}


def outcome(monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    return vars(settings("demo", presets=PRESETS, **DEFAULTS))


def run_with(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def refusal(monkeypatch, **environment):
    with pytest.raises(Error) as caught:
        outcome(monkeypatch, **environment)
    return str(caught.value)


def test_set_overrides_single_values_in_the_type_of_the_default(monkeypatch):
    values = outcome(monkeypatch, SET="epochs=1_000 learning_rate=2 shuffle=no name='two words'")
    assert values == dict(epochs=1000, learning_rate=2.0, shuffle=False, name="two words")
    assert [type(value) for value in values.values()] == [int, float, bool, str]


def test_what_differs_from_the_run_that_goes_on_is_known(monkeypatch, tmp_path):
    run = run_with(tmp_path, json.dumps({"settings": {"epochs": 7, "learning_rate": 0.1}}))
    outcome(monkeypatch, RESUME=run, SET="epochs=7 learning_rate=0.2 shuffle=no")
    assert current.changed == {"learning_rate": (0.1, 0.2)}
    monkeypatch.delenv("RESUME")
    outcome(monkeypatch)
    assert current.changed == {}


def test_set_wins_over_preset_and_preset_over_resume(monkeypatch, tmp_path):
    run = run_with(
        tmp_path, json.dumps({"settings": {"epochs": 7, "name": "saved", "shuffle": False}})
    )
    values = outcome(monkeypatch, RESUME=run, PRESET="full", SET="epochs=1")
    assert values == dict(epochs=1, learning_rate=1e-3, shuffle=False, name="large")


def test_an_unknown_setting_lists_those_that_exist(monkeypatch):
    message = refusal(monkeypatch, SET="epoch=1")
    assert "'epoch'" in message
    assert all(name in message for name in DEFAULTS)


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
