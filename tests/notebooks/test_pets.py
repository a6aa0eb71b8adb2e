"""The exercises of `pets` judge rightly, its data are checked, its baseline counts as it says."""

import json

import numpy as np
import pytest
import torch
from tutorials_here import assert_judged, names_of

import ddp_common as ddp


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    with names_of("pets", tmp_path_factory.mktemp("runs")) as names:
        yield names


# The log


def words_of(log):
    return [line.split() for line in log.splitlines()]


def read_backwards(log):
    """From the kill back to the last start before it."""
    lines = words_of(log)
    (kill,) = [n for n, words in enumerate(lines) if words[3:5] == ["was", "killed"]]
    rank = lines[kill][2]
    start = next(words for words in lines[kill::-1] if words[2] == rank and words[3] == "started:")
    return int(rank), int(start[5])


def rank_that_lost_its_connection(log):
    """The consequence, taken for the cause."""
    rank = next(words[2] for words in words_of(log) if words[3] == "failed:")
    starts = [words for words in words_of(log) if words[2] == rank and words[3] == "started:"]
    return int(rank), int(starts[-1][5])


def test_a_log_that_is_read_backwards_is_read_rightly(pets, capsys):
    answers = [read_backwards, rank_that_lost_its_connection]
    assert_judged(pets, capsys, "check_log", *answers, "Which start of that rank")


# A run that was killed, stopped and resumed

LOG = """\
10:00:00 rank 1 started: process 11 on here
10:00:01 rank 1 was killed by SIGKILL
10:00:01 Restart 1 on 2 rank(s) from step 50. Why: Rank 1 of 2 on here failed
10:00:01 [rank 0] Resumed from step-00000050.pt
10:00:02 interrupted from the keyboard
10:00:09 [rank 0] Resumed from step-00000050.pt
10:00:20 finished: 2 rank(s), 11.0 s
"""


@pytest.fixture(scope="module")
def finished(pets, tmp_path_factory):
    """A short run, and its settings: seed 3."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    chosen = {"epochs": 1, "batch_size": 4096, "learning_rate": 0.01, "layers": 1, "hidden": 8}
    chosen["seed"] = 3
    samples = {"contexts": pets["contexts"], "targets": pets["targets"]}
    ddp.launch(pets["client"], pets["train"], **samples, **chosen, workers=2, directory=folder)
    return folder, {**chosen, "data": pets["settings"].data}


def says(finished, log, **settings):
    """The answer of somebody who did what `log` says, with these settings."""
    folder, chosen = finished
    config = {"settings": {**chosen, **settings}, "workers": [{}, {}]}

    def answer():
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "log.txt").write_text(log)
        return str(folder)

    return answer


def test_a_run_of_other_settings_is_accepted_if_a_rank_was_killed_and_not_asked_to_leave(
    pets, finished, capsys
):
    asked = LOG.replace(
        "rank 1 was killed by SIGKILL", "stopped after step 60: rank 1 was told to"
    )
    answers = [says(finished, LOG), says(finished, asked)]
    assert_judged(pets, capsys, "check_my_run", *answers, "`kill` without -9")


def test_a_run_whose_settings_were_changed_on_the_way_is_refused(pets, finished, capsys):
    answers = [says(finished, LOG), says(finished, LOG, seed=4)]
    assert_judged(pets, capsys, "check_my_run", *answers, "Did you change a setting")


# The repair of a script

LOOP = "for epoch in range(3):\n"
SAVE = "torch.save(model.state_dict()"
SAVED = (SAVE, "torch.save(model.module.state_dict()")
TOLD = (LOOP, LOOP + "    sampler.set_epoch(epoch)\n")


def repaired(pets, *changes):
    """An answer that names both faults, and makes these replacements."""
    script = pets["broken_script"]()
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    return lambda: ({"B", "E"}, script)


@pytest.mark.parametrize(
    ("wrong", "question"),
    [
        ([SAVED, (LOOP, "sampler.set_epoch(1)\n" + LOOP)], "told, and when"),
        ([TOLD], "Whose state do you save"),
    ],
    ids=["the epoch is told once", "the wrapper's state is saved"],
)
def test_a_repair_that_counts_epochs_otherwise_is_accepted_and_half_a_one_refused(
    pets, capsys, wrong, question
):
    otherwise = (LOOP, LOOP + "    loader.sampler.set_epoch(100 + epoch)\n")
    answers = [repaired(pets, SAVED, otherwise), repaired(pets, *wrong)]
    assert_judged(pets, capsys, "check_repair", *answers, question)


# The search for a learning rate


def test_a_search_with_batches_of_its_own_is_accepted_and_one_by_training_loss_refused(
    pets, capsys
):
    model_of, loss_of = pets["NameModel"], pets["loss_of"]

    def train_one(learning_rate, fit, validation):
        torch.manual_seed(1)
        model = model_of(layers=1, hidden=32)
        optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
        for rows in torch.randperm(len(fit[0])).split(100):
            loss = torch.nn.functional.cross_entropy(
                model(fit[0][rows].long()), fit[1][rows].long()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss_of(model.state_dict(), validation), model.state_dict()

    def chosen_by_training(learning_rate, fit, validation):
        return train_one(learning_rate, fit, fit)

    answers = [train_one, chosen_by_training]
    assert_judged(pets, capsys, "check_search", *answers, "Whose loss")


# The data and the baseline


@pytest.mark.parametrize(
    ("content", "said"),
    [("name,count\nbella,2\nzoë,1\n", "'zoë' has 'ë'"), ("name,count\n", "holds no names")],
)
def test_names_that_cannot_be_learned_are_refused(pets, tmp_path, content, said):
    (tmp_path / "names.csv").write_text(content)
    with pytest.raises(ddp.Error, match=said):
        pets["read_names"](tmp_path / "names.csv")


def test_an_n_gram_counts_what_followed_and_its_probabilities_sum_to_one(pets):
    contexts, targets = pets["windows"](["bella", "bello"])
    rows = pets["as_rows"](contexts, targets)
    last = next(row for row in rows if pets["ALPHABET"][row[-1]] == "o")
    *_, probability = pets["ngram_probabilities"](rows, last[None], 5, 1e-9)
    assert np.isclose(probability, 0.5)  # after 'bell' came 'a' once and 'o' once
    every = torch.arange(1, len(pets["ALPHABET"]), dtype=torch.uint8)  # '*' is never next
    asked = pets["as_rows"](contexts[3].repeat(len(every), 1), every)
    for probabilities in pets["ngram_probabilities"](rows, asked, 7, 5.0):
        assert np.isclose(probabilities.sum(), 1)
