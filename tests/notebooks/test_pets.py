"""The checks of `pets` judge rightly, its data are checked, and the names it invents are tame."""

import os
import re
import subprocess

import jupytext
import pytest
import torch
from tutorials_here import ROOT, names_of

import ddp_common as ddp
from tutorials.checks import pets as checks
from tutorials.helpers import ALPHABET, n_gram, name_filter, read_names


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    with names_of("pets", tmp_path_factory.mktemp("runs")) as names:
        yield names


# The prediction


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        ("same", "'same'. Right"),
        (" Same!", "'same'. Right"),
        ("close", "'close'. Not right"),
        ("they are different", "'different'. Not right"),
        ("not the same", "is that same, close or different"),
        ("same or close", "is that same, close or different"),
        ("same up to rounding", "is that same, close or different"),
        ("equal up to rounding, with the same batches", "is that same, close or different"),
        ("only rounding differs", "'close'. Not right"),
        (3, "is that same, close or different"),
        (None, "no prediction"),
        (..., "no prediction"),
    ],
)
def test_each_prediction_gets_a_reply(said, reply):
    assert reply in checks.prediction(said)


# Exercise B: a run that was stopped, killed and resumed

STOPPED = "10:00:02 interrupted from the keyboard\n"
KILLED = "10:00:04 rank 1 was killed by SIGKILL\n"
RESUMED = "10:00:06 [rank 0] Resumed from step-00000050.pt\n"
FINISHED = "10:00:20 finished: 2 rank(s), 11.0 s\n"


@pytest.mark.parametrize(
    ("log", "question"),
    [
        (STOPPED + RESUMED + KILLED + RESUMED + FINISHED, None),
        (KILLED + RESUMED + STOPPED + RESUMED + FINISHED, None),
        (STOPPED + RESUMED + KILLED + STOPPED + RESUMED + FINISHED, None),
        (STOPPED + RESUMED + STOPPED + RESUMED + FINISHED, "`kill` without -9"),
        (KILLED + RESUMED + FINISHED, "before you came"),
        (STOPPED + KILLED + RESUMED + FINISHED, "a checkpoint"),
        (STOPPED + RESUMED + KILLED, "after the run had failed"),
        (STOPPED + RESUMED + KILLED + RESUMED, "still training"),
    ],
)
def test_a_log_tells_what_was_done_to_a_run(log, question):
    missing = [asked for _, happened, asked in checks.events_in(log) if not happened]
    assert question in missing[0] if question else not missing


# What is typed in a terminal


def test_terminal_lines_work_where_jupyterlab_opens_one_in_plain_sh_and_without_git(tmp_path):
    cells = jupytext.read(ROOT / "tutorials" / "pets.py").cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    opened, run = tmp_path / "tutorials", tmp_path / "runs" / "pets" / "2026-01-31T10-00-00"
    opened.mkdir()
    run.mkdir(parents=True)
    for name in ("log", "names"):
        (run / f"{name}.txt").write_text(f"{name}\n")
    typed = "\n".join(re.findall("(?m)^ {4,}((?:cd|cat) .*)", text))
    assert typed.startswith('cd "$JUPYTER_SERVER_ROOT/.."\ncat ')
    assert '`cd "$JUPYTER_SERVER_ROOT/.."`' in text[text.index("### Exercise B") :]
    environment = {"PATH": os.defpath, "JUPYTER_SERVER_ROOT": str(opened)}
    done = subprocess.run(
        ["sh", "-ec", typed], cwd=opened, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "log\nnames\n" + "log\n", done.stderr


# The data, and the names that are invented


@pytest.mark.parametrize(
    ("content", "said"),
    [("name,count\nbella,2\nzoë,1\n", "'zoë' has 'ë'"), ("name,count\n", "holds no names")],
)
def test_names_that_cannot_be_learned_are_refused(tmp_path, content, said):
    (tmp_path / "names.csv").write_text(content)
    with pytest.raises(ddp.Error, match=said):
        read_names(tmp_path / "names.csv")


def test_windows_hold_every_character_once_and_the_one_before_them(pets):
    windows = pets["windows"]
    assert windows.shape[1] == 17 and torch.equal(windows[1:, 0], windows[:-1, -1])
    row = pets["row"]
    text = "".join(ALPHABET[code] for code in row)
    assert text[1:-1].split("+") == list(pets["shuffled"])
    assert torch.equal(windows[:, 1:].flatten(), row[1 : len(windows) * 16 + 1])


def test_n_grams_count_what_follows():
    names = ["ab", "ab", "ab", "ac"]
    equally = -torch.tensor(1 / 4).log()  # of a, b, c and '+'
    assert n_gram(names, ["ab"], n=1, prior=1e9) == pytest.approx(float(equally), rel=1e-6)
    single = n_gram(names, ["ab"], n=1, prior=0)
    letters = torch.tensor([4 / 12, 3 / 12, 4 / 12])  # a, b and '+' among 12 characters
    assert single == pytest.approx(float(-letters.log().mean()))
    pair = n_gram(names, ["ab"], n=2, prior=0)  # after a: b in 3 of 4 cases
    assert pair == pytest.approx(float(-torch.tensor(3 / 4).log() / 3), rel=1e-6)


def test_no_invented_name_is_short_rare_or_registered(pets):
    model = pets["NameModel"](layers=1, hidden=8)  # untrained: it writes anything
    registered = set(pets["table"]["name"])
    for name in pets["invent"](model, count=5_000):
        assert re.fullmatch("[a-z]+", name) and name not in registered
        assert len(re.findall("[aeiouy]+", name)) >= 3
    is_tame = name_filter(registered)
    assert is_tame("marabella")
    for refused in ("sam", "bella", "mara bella", "xqzaxqoxqu"):
        assert not is_tame(refused)
