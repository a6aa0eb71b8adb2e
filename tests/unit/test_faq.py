"""The page of questions: its blocks of Python run, and every test that it names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faq.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
QUESTIONS = re.split(r"^## ", PAGE, flags=re.M)[1:]


def names_of_tests():
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found.update(re.findall(r"def (test_\w+)", path.read_text()))
    return found


@pytest.mark.parametrize("question", QUESTIONS, ids=[each.splitlines()[0] for each in QUESTIONS])
def test_every_answer_names_tests_that_are_there(question):
    named = set(re.findall(r"`(test_\w+)`", question))
    assert "*Tested by*" in question
    assert named
    assert named <= names_of_tests(), f"docs/faq.md names {named}: not all are there"
    assert ("```" in question) == ("*Tested by* the block" in question)


def test_the_blocks_do_what_the_page_says(client):
    logged = []
    names = {"client": client, "log": lambda *what: logged.append(what), "__name__": "faq"}
    for number, code in enumerate(BLOCKS, 1):
        exec(compile(code, f"docs/faq.md, block {number}", "exec"), names)
    assert names["run"].result.shape == (1, 3)
    assert [step for _, _, step in logged] == [*range(1, 9)]  # one line a step, not one a rank
    assert all(isinstance(loss, float) and name == "loss" for name, loss, _ in logged)
    # the second launch added two epochs to the two of the first, and repeated none
    steps = names["again"].metrics.groupby("rank")["step"].apply(list)
    assert all(of_rank == [*range(1, 17)] for of_rank in steps)
    assert names["best"] == 0.3


def test_every_thread_is_named_by_its_own_address():
    links = re.findall(r"\[([\w -]*#(\d+))\]\((https://github\.com/[^)]+)\)", PAGE)
    assert len(links) > 10
    for words, number, address in links:
        assert address.endswith(f"/{number}"), f"{words} leads to {address}"
