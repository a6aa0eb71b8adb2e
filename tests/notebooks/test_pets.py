"""What the notebook `pets` teaches by functions.

Its exercises judge rightly, its data are checked.
"""

import pytest
from tutorials_here import names_of

import ddp_common as ddp


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    with names_of("pets", tmp_path_factory.mktemp("runs")) as names:
        yield names


def test_the_checks_of_pets_accept_the_solutions(pets, capsys):
    assert pets["check_share"](pets["my_share"])
    assert pets["check_weight"](pets["my_weight"])
    assert pets["check_search"](pets["train_one"])
    assert capsys.readouterr().out.count("right") == 3


@pytest.mark.parametrize(
    "check, wrong",
    [
        (
            "check_share",
            lambda batch, rank, size: batch[
                rank * (len(batch) // size) : (rank + 1) * (len(batch) // size)
            ],
        ),
        ("check_share", lambda batch, rank, size: batch),
        ("check_share", lambda batch, rank, size: None),
        ("check_weight", lambda mine, everyones, size: mine / everyones),
        ("check_weight", lambda mine, everyones, size: 1.0),
        ("check_weight", lambda mine, everyones, size: None),
        ("check_search", lambda rate, contexts, targets: None),
        ("check_search", lambda rate, contexts, targets: (rate, rate)),
    ],
)
def test_the_checks_of_pets_refuse_wrong_answers(pets, capsys, check, wrong):
    assert not pets[check](wrong)
    assert "not yet" in capsys.readouterr().out


@pytest.mark.parametrize("check", ["check_share", "check_weight", "check_search"])
def test_an_answer_to_pets_that_raises_is_shown_in_words(pets, capsys, check):
    ddp.judge(pets[check], pets["crashes"])
    said = capsys.readouterr().out
    assert said.startswith("not yet") and "ZeroDivisionError: division by zero" in said


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
