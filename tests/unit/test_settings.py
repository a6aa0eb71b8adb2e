import json
import os

import pytest

from ddp_common import Error, settings
from ddp_common.run.config import current, describe

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


def test_the_defaults_hold_when_nothing_is_set(monkeypatch):
    assert outcome(monkeypatch) == DEFAULTS


def test_set_overrides_single_values_in_the_type_of_the_default(monkeypatch):
    values = outcome(monkeypatch, SET="epochs=1_000 learning_rate=2 shuffle=no name='two words'")
    assert values == dict(epochs=1000, learning_rate=2.0, shuffle=False, name="two words")
    assert [type(value) for value in values.values()] == [int, float, bool, str]


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("YES", True), ("False", False), ("0", False)]
)
def test_set_knows_the_usual_words_for_true_and_false(monkeypatch, text, value):
    assert outcome(monkeypatch, SET=f"shuffle={text}")["shuffle"] is value


def test_a_value_may_contain_an_equals_sign(monkeypatch):
    assert outcome(monkeypatch, SET="name=a=b")["name"] == "a=b"


def test_a_preset_replaces_what_it_names_and_keeps_the_rest(monkeypatch):
    assert outcome(monkeypatch, PRESET="full") == {**DEFAULTS, "epochs": 25, "name": "large"}
    assert outcome(monkeypatch, PRESET="laptop") == DEFAULTS


def test_resume_takes_the_values_of_the_earlier_run(monkeypatch, tmp_path):
    run = run_with(tmp_path, json.dumps({"settings": {"epochs": 7, "of_an_older_version": 1}}))
    assert outcome(monkeypatch, RESUME=run) == {**DEFAULTS, "epochs": 7}


def test_what_differs_from_the_run_that_goes_on_is_known(monkeypatch, tmp_path):
    run = run_with(tmp_path, json.dumps({"settings": {"epochs": 7, "learning_rate": 0.1}}))
    outcome(monkeypatch, RESUME=run, SET="epochs=7 learning_rate=0.2 shuffle=no")
    assert current.changed == {"learning_rate": (0.1, 0.2)}
    monkeypatch.delenv("RESUME")
    outcome(monkeypatch)
    assert current.changed == {}


def test_a_run_is_described_where_there_is_no_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe([])["git"] is None


def test_of_a_folder_of_runs_the_newest_is_named(monkeypatch, tmp_path):
    for number, name in enumerate(("b", "a")):
        (tmp_path / name).mkdir()
        run_with(tmp_path / name, "{}")
        os.utime(tmp_path / name / "config.json", (number, number))
    said = refusal(monkeypatch, RESUME=tmp_path)
    assert said.endswith(f"name one of them. The newest is {tmp_path / 'a'}.")


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


def test_an_unknown_preset_lists_those_that_exist(monkeypatch):
    message = refusal(monkeypatch, PRESET="huge")
    assert "'huge'" in message and "laptop" in message and "full" in message


def test_a_misspelled_name_in_a_preset_is_refused_whichever_preset_is_chosen():
    presets = {"full": {"epochs": 25}, "huge": {"epoch": 100}}
    with pytest.raises(Error, match="preset 'huge' of demo sets 'epoch'.*epochs, learning_rate"):
        settings("demo", presets=presets, **DEFAULTS)


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("epochs=1.5", "whole number"),
        ("epochs=many", "whole number"),
        ("epochs=", "whole number"),
        ("learning_rate=fast", "a number"),
        ("shuffle=perhaps", "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_type_that_is_wanted(
    monkeypatch, word, wanted
):
    message = refusal(monkeypatch, SET=word)
    assert wanted in message and word.partition("=")[0] in message


def test_a_word_without_equals_sign_is_refused_with_an_example(monkeypatch):
    message = refusal(monkeypatch, SET="epochs 5")
    assert "'epochs'" in message and "epochs=3" in message


def test_an_open_quotation_mark_is_refused(monkeypatch):
    assert "SET" in refusal(monkeypatch, SET="name='two words")


def test_resume_of_a_folder_without_a_run_says_what_is_missing(monkeypatch, tmp_path):
    message = refusal(monkeypatch, RESUME=tmp_path / "nowhere")
    assert "nowhere" in message and "config.json" in message


@pytest.mark.parametrize("text", ['{"settings": {"epochs"', "", "[]", '{"settings": 3}', '"text"'])
def test_resume_with_a_damaged_config_names_the_file(monkeypatch, tmp_path, text):
    assert "config.json" in refusal(monkeypatch, RESUME=run_with(tmp_path, text))


def test_resume_with_a_config_of_other_bytes_names_the_file(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "config.json" in refusal(monkeypatch, RESUME=tmp_path)
