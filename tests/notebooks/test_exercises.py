"""The checks of the exercises refuse what they once let pass; `make mutants` has many more."""

import pytest

from tests.mutants.__main__ import exercises, judge

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
