"""Whatever an answer does, it is judged in words below the cell, and the notebook goes on."""

import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

import ddp_common as ddp
from tests.mutants.__main__ import PAGE, digest_of_checks
from tutorials.checks.common import SHOWN, Wrong, judge


def check_double(answer):
    for number in (1, 4):
        if answer(number) + 0 != 2 * number:
            raise Wrong(answer(number), 2 * number, f"What is {number} + {number}?")
    return "twice 1 and twice 4."


def said_of(answer, capsys, **options):
    assert judge(check_double, answer, **options) is None  # nothing else stands below the cell
    return capsys.readouterr().out


def double(number):
    return number + number


def test_a_right_answer_is_told_why_and_a_wrong_one_gets_a_question(capsys):
    assert said_of(double, capsys) == "right: twice 1 and twice 4.\n"
    assert said_of(lambda number: 2, capsys) == (
        "not yet\n  yours:    2\n  expected: 8\n  What is 4 + 4?\n"
    )


def looks_up_nothing(number):
    half = number / 2
    return {}[half]


@pytest.mark.parametrize(
    "answer, why",
    [
        (
            looks_up_nothing,
            "looks_up_nothing cannot be judged. Its line 3, `return {}[half]`, raises: KeyError: "
            "0.5\n",
        ),
        (lambda number: "two", "<lambda> cannot be judged. The check cannot use what it returns"),
        (lambda number: sys.exit("enough"), "<lambda> calls sys.exit('enough'). That would end"),
    ],
    ids=["raises", "another_type", "leaves_python"],
)
def test_an_answer_that_cannot_be_judged_is_told_why(capsys, answer, why):
    said = said_of(answer, capsys)
    assert said.startswith(f"not yet: {why}") and "Traceback" not in said


def test_a_rank_that_fails_is_named_with_the_line_that_raised(capsys):
    def loses_a_rank(number):
        raise ddp.RankFailed(
            "Rank 1 of 2 failed: KeyError: 'x'\nIts log …",
            rank=1,
            host="here",
            traceback="Traceback …\n  line 7, in train\n    batch['x']\nKeyError: 'x'\n",
        )

    said = said_of(loses_a_rank, capsys)
    assert said.startswith("not yet: Rank 1 of 2 failed: KeyError: 'x'\n")
    assert "batch['x']" in said and "Its log" not in said


def loops_for_ever(number):
    while True:
        try:
            time.sleep(0.01)
        except Exception:  # as a student may write: what ends it must be stronger
            continue


def test_an_answer_that_never_ends_is_ended(capsys):
    said = said_of(loops_for_ever, capsys, timeout=0.5)
    assert said.startswith("not yet: loops_for_ever was ended after 0.5 s. Is there a loop")


def test_of_a_flood_of_output_the_beginning_is_shown_and_then_the_verdict(capsys):
    def prints(number):
        for _ in range(1_000):
            print("seven x")  # the limit is the end of a line
        return 2 * number

    said = said_of(prints, capsys)
    assert said.endswith("\n… [more was printed]\nright: twice 1 and twice 4.\n")
    assert len(said) < SHOWN + 100


def test_a_process_that_an_answer_leaves_running_is_ended(capsys):
    started = []

    def leaves_one(number):
        started.append(psutil.Popen(["sleep", "1000"]))
        return 2 * number

    bystander = subprocess.Popen(["sleep", "1001"])
    try:
        said = said_of(leaves_one, capsys)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    for process in started:
        assert process.wait(60) == -signal.SIGKILL
    assert said.startswith("2 process(es) that were left running have been ended.\nright: ")


def test_the_table_for_instructors_is_of_these_checks_and_names_no_hole():
    page = PAGE.read_text()
    table = page.partition("<!-- mutants -->")[2].partition("<!-- end of mutants -->")[0]
    numbers = re.findall(r"\*\*(\d+)\*\*", table)
    wrong, refused, equivalent, holes, right, refused_wrongly = map(int, numbers)
    assert wrong >= 350 and right >= 130 and holes == refused_wrongly == 0
    assert wrong == refused + equivalent
    assert f"checks {digest_of_checks()}" in table, "checks have changed: run `make mutants`"
