"""The checks of the exercises refuse what they once let pass; `make mutants` has many more."""

import re

import pytest

from tests.mutants.__main__ import PAGE, digest_of_checks, exercises, judge

QUICK: dict = {}
for each in exercises():
    each.answers = [answer for answer in each.answers if answer.is_quick]
    QUICK.setdefault(each.lesson, []).append(each)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lesson", QUICK)
def test_what_was_a_hole_is_refused_and_what_is_right_is_not(lesson):
    wanted = [(judged, answer) for judged in QUICK[lesson] for answer in judged.answers]
    assert len(list(judge(lesson, wanted))) == len(wanted)
    assert not [why for judged in QUICK[lesson] for why in judged.wrongly()]


def test_the_table_for_instructors_is_of_these_checks_and_names_no_hole():
    page = PAGE.read_text()
    table = page.partition("<!-- mutants -->")[2].partition("<!-- end of mutants -->")[0]
    numbers = re.findall(r"\*\*(\d+)\*\*", table)
    wrong, refused, equivalent, holes, right, refused_wrongly = map(int, numbers)
    assert wrong >= 350 and right >= 130 and holes == refused_wrongly == 0
    assert wrong == refused + equivalent
    assert f"checks {digest_of_checks()}" in table, "checks have changed: run `make mutants`"
