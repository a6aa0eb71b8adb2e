"""What the notebook `pets` teaches by functions.

Its exercises judge rightly, its data are checked, its baseline counts as it says.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tutorials_here import ROOT, alt_texts, lines_cut_off, names_of

import ddp_common as ddp

SLOW = 300  # seconds: a machine may be busy, and scripts run under torchrun


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    with names_of("pets", tmp_path_factory.mktemp("runs")) as names:
        yield names


@pytest.fixture(scope="module")
def by_hand(pets):
    """A run directory in which a rank was killed, which was stopped, and resumed."""
    return Path(pets["my_run"]())


# Exercise 1


def test_the_check_of_the_log_accepts_the_solution(pets, capsys):
    assert pets["check_log"](pets["who_was_killed"])
    assert "right" in capsys.readouterr().out


def lines_of(log):
    return [line.split() for line in log.splitlines()]


def killed_rank(log):
    return next(int(words[2]) for words in lines_of(log) if words[3:5] == ["was", "killed"])


def starts_of(log, rank):
    return [
        int(words[5]) for words in lines_of(log) if words[1:4] == ["rank", str(rank), "started:"]
    ]


def rank_that_failed(log):
    """The consequence, taken for the cause."""
    return next(int(words[2]) for words in lines_of(log) if words[3] == "failed:")


WRONG_READINGS = {
    "the first start in the log": lambda log: (
        killed_rank(log),
        starts_of(log, killed_rank(log))[0],
    ),
    "the last start in the log": lambda log: (
        killed_rank(log),
        starts_of(log, killed_rank(log))[-1],
    ),
    "the rank that reports the lost connection": lambda log: (
        rank_that_failed(log),
        starts_of(log, rank_that_failed(log))[-1],
    ),
    "text instead of numbers": lambda log: ("1", "2"),
    "the process number alone": lambda log: starts_of(log, killed_rank(log))[0],
    "nothing": lambda log: None,
}


@pytest.mark.parametrize("wrong", WRONG_READINGS.values(), ids=WRONG_READINGS)
def test_a_wrong_reading_of_the_log_is_refused(pets, capsys, wrong):
    assert not pets["check_log"](wrong)
    said = capsys.readouterr().out
    assert "not yet" in said and "expected" in said and "?" in said


# Exercise 2


@pytest.mark.slow
@pytest.mark.timeout(SLOW)
def test_a_run_killed_stopped_and_resumed_is_accepted(pets, by_hand, capsys):
    assert pets["check_my_run"](lambda: str(by_hand))
    said = capsys.readouterr().out
    assert "bit for bit" in said and said.count(": yes") == 5


LOG = """\
10:00:00 rank 1 started: process 11 on here
10:00:01 rank 1 was killed by SIGKILL
10:00:01 Restart 1 on 2 rank(s) from step 50. Why: Rank 1 of 2 on here failed
10:00:01 rank 1 started: process 12 on here
10:00:01 [rank 0] Resumed from step-00000050.pt
10:00:02 interrupted from the keyboard
10:00:09 rank 1 started: process 13 on here
10:00:09 [rank 0] Resumed from step-00000050.pt
10:00:20 finished: 2 rank(s), 11.0 s
"""


@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        ("was killed by SIGKILL", "a rank was killed"),
        ("Restart 1", "the run restarted by itself"),
        ("interrupted from the keyboard", "interrupted by Ctrl-C"),
        ("10:00:09 [rank 0] Resumed", "resumed from a checkpoint"),
        ("finished:", "finished"),
    ],
)
def test_a_run_to_which_less_was_done_is_refused(pets, tmp_path, capsys, left_out, missing):
    log = "".join(line for line in LOG.splitlines(True) if left_out not in line)
    (tmp_path / "log.txt").write_text(log)
    (tmp_path / "config.json").write_text("{}")
    assert not pets["check_my_run"](lambda: str(tmp_path))
    said = capsys.readouterr().out
    assert f"not yet: {missing}: yours no, expected yes." in said and "?" in said


def test_a_rank_that_was_asked_to_leave_was_not_killed(pets, tmp_path, capsys):
    told = LOG.replace("rank 1 was killed by SIGKILL", "stopped after step 60: rank 1 was told to")
    (tmp_path / "log.txt").write_text(told)
    (tmp_path / "config.json").write_text("{}")
    assert not pets["check_my_run"](lambda: str(tmp_path))
    assert "`kill` without -9" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [None, 5, "runs/pets/none", "", str(ROOT)])
def test_what_is_no_run_directory_is_refused(pets, capsys, wrong):
    assert not pets["check_my_run"](lambda: wrong)
    assert "expected a run directory" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(SLOW)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"seed": 1}, "not those of an undisturbed run"),
        ({"data": "mine.csv"}, "take the names and the number of ranks"),
    ],
)
def test_a_run_that_ends_elsewhere_is_refused(pets, by_hand, tmp_path, capsys, settings, reason):
    copy = shutil.copytree(by_hand, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["settings"] |= settings
    (copy / "config.json").write_text(json.dumps(config))
    assert not pets["check_my_run"](lambda: str(copy))
    said = capsys.readouterr().out
    assert "not yet" in said and reason in said


# Exercise 3

LOOP = "for epoch in range(3):\n"
STEP = "        optimizer.step()\n"
SAVE = "torch.save(model.state_dict()"


def changed(*changes):
    """An answer to exercise 3: both faults named, and the script with these replacements."""

    def answer(script):
        for old, new in changes:
            assert old in script
            script = script.replace(old, new)
        return {"B", "E"}, script

    return answer


SAVED = (SAVE, "torch.save(model.module.state_dict()")
TOLD = (LOOP, LOOP + "    sampler.set_epoch(epoch)\n")
WRONG_REPAIRS = {
    "nothing is repaired": changed(),
    "the file alone is repaired": changed(SAVED),
    "the sampler alone is told": changed(TOLD),
    "another generator is seeded": changed(SAVED, (LOOP, LOOP + "    torch.manual_seed(epoch)\n")),
    "told once, before the loop": changed(SAVED, (LOOP, "sampler.set_epoch(1)\n" + LOOP)),
    "told after the epoch": changed(SAVED, ("*seen)\n", "*seen)\n    sampler.set_epoch(epoch)\n")),
    "each rank is told another epoch": changed(
        SAVED, (LOOP, LOOP + "    sampler.set_epoch(epoch + 7 * dist.get_rank())\n")
    ),
    "not shuffled at all": changed(SAVED, ("seed=seed)", "seed=seed, shuffle=False)")),
    "a new model is saved": changed(
        TOLD,
        (SAVE, "torch.manual_seed(seed)\n    torch.save(torch.nn.Linear(1, 1).state_dict()"),
    ),
    "nothing is saved": changed(TOLD, (SAVE, "print(model.state_dict()")),
    "it fails": changed(TOLD, SAVED, (STEP, STEP + "        undefined\n")),
    "other faults are named": lambda script: ({"A", "D"}, changed(TOLD, SAVED)(script)[1]),
    "one fault is named": lambda script: ({"B"}, changed(TOLD, SAVED)(script)[1]),
}


@pytest.mark.timeout(SLOW)
def test_the_repaired_script_is_accepted(pets, capsys):
    assert pets["check_repair"](pets["my_repair"])
    assert "right" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(SLOW)
@pytest.mark.parametrize("wrong", WRONG_REPAIRS)
def test_a_wrong_repair_is_refused(pets, capsys, script_runs, wrong):
    repair = WRONG_REPAIRS[wrong]
    assert not pets["check_repair"](lambda: repair(pets["broken_script"]()))
    said = capsys.readouterr().out
    assert said.count("not yet") == 1 and "?" in said
    assert script_runs and not any(run.timed_out for run in script_runs)
    assert all(run.ok for run in script_runs) == (wrong != "it fails"), script_runs


# Stretch


def test_the_search_is_accepted(pets, capsys):
    assert pets["check_search"](pets["train_one"])
    assert "right" in capsys.readouterr().out


def of_training(pets, learning_rate, fit, validation):
    """The loss that must not choose."""
    return pets["train_one"](learning_rate, fit, fit)


def made_up(pets, learning_rate, fit, validation):
    return -learning_rate, pets["train_one"](learning_rate, fit, validation)[1]


def untrained(pets, learning_rate, fit, validation):
    weights = pets["NameModel"](layers=1, hidden=32).state_dict()
    return pets["loss_of"](weights, validation), weights


def a_pair_of_rates(pets, learning_rate, fit, validation):
    return learning_rate, -learning_rate


@pytest.mark.parametrize("wrong", [of_training, made_up, untrained, a_pair_of_rates])
def test_a_search_that_did_not_search_is_refused(pets, capsys, wrong):
    class HereInstead:
        """Answers the check in this process: what is wrong need not travel."""

        def map(self, function, rates, pure, **arguments):
            return [function(rate, **arguments) for rate in rates]

        def gather(self, futures):
            return futures

    client = pets["client"]
    pets["client"] = HereInstead()
    try:
        ddp.judge(
            pets["check_search"],
            lambda learning_rate, fit, validation: wrong(pets, learning_rate, fit, validation),
        )
    finally:
        pets["client"] = client
    said = capsys.readouterr().out
    assert "not yet" in said and "right" not in said


@pytest.mark.parametrize("check", ["check_log", "check_my_run", "check_repair", "check_search"])
def test_an_answer_to_pets_that_raises_is_shown_in_words(pets, capsys, check):
    ddp.judge(pets[check], pets["crashes"])
    said = capsys.readouterr().out
    assert said.startswith("not yet") and "ZeroDivisionError: division by zero" in said


@pytest.mark.parametrize("check", ["check_log", "check_my_run", "check_repair", "check_search"])
def test_an_answer_that_is_not_written_yet_is_refused_once(pets, capsys, check):
    ddp.judge(pets[check], lambda *given, **named: None)
    assert capsys.readouterr().out.count("not yet") == 1


# The data and the baseline


def test_a_name_outside_the_alphabet_is_refused_by_name(pets, tmp_path):
    (tmp_path / "names.csv").write_text("name,count\nbella,2\nzoë,1\n")
    with pytest.raises(ddp.Error, match="'zoë' has 'ë'"):
        pets["read_names"](tmp_path / "names.csv")


@pytest.mark.parametrize("content", ["name,count\n", "something,else\nbella,1\n"])
def test_a_table_without_names_is_refused(pets, tmp_path, content):
    (tmp_path / "names.csv").write_text(content)
    with pytest.raises(ddp.Error, match="holds no names"):
        pets["read_names"](tmp_path / "names.csv")


def test_windows_of_a_name(pets):
    contexts, targets = pets["windows"](["bo"])
    alphabet = pets["ALPHABET"]
    assert ["".join(alphabet[code] for code in row) for row in contexts] == [
        "*" * 8,
        "*" * 7 + "b",
        "*" * 6 + "bo",
    ]
    assert "".join(alphabet[code] for code in targets) == "bo+"


def test_the_probabilities_of_n_grams_sum_to_one(pets):
    contexts, targets = pets["windows"](["bella", "bello", "luna", "lulu"])
    training = pets["as_rows"](contexts, targets)
    every = torch.arange(1, len(pets["ALPHABET"]), dtype=torch.uint8)  # '*' is never next
    asked = pets["as_rows"](contexts[3].repeat(len(every), 1), every)
    for probabilities in pets["ngram_probabilities"](training, asked, 7, 5.0):
        assert np.isclose(probabilities.sum(), 1)


def test_an_n_gram_counts_what_followed(pets):
    contexts, targets = pets["windows"](["bella", "bello"])
    rows = pets["as_rows"](contexts, targets)
    last = next(row for row in rows if pets["ALPHABET"][row[-1]] == "o")
    *_, probability = pets["ngram_probabilities"](rows, last[None], 5, 1e-9)
    assert np.isclose(probability, 0.5)  # after 'bell' came 'a' once and 'o' once


def test_every_picture_of_pets_has_a_text_for_those_who_cannot_see_it():
    texts = alt_texts("pets")
    assert len(texts) >= 5 and all(len(text) > 60 for text in texts), texts


def test_no_line_of_pets_is_cut_off_on_a_page():
    assert lines_cut_off("pets") == []
