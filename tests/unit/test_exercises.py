"""An exercise says what is wrong in words: no bare False, no traceback of the check."""

import pytest

import ddp_common as ddp


def check_double(answer):
    for number in (1, 4):
        if answer(number) + 0 != 2 * number:
            print(f"not yet: of {number}: yours {answer(number)}, expected {2 * number}")
            return False
    print("right")
    return True


def double(number):
    return number + number


def crashes(number):
    half = number / 2
    return half / (number - number)


def test_a_right_answer_and_a_wrong_one_leave_nothing_but_the_words_of_the_check(capsys):
    assert ddp.judge(check_double, double) is None
    assert ddp.judge(check_double, lambda number: 3) is None
    assert capsys.readouterr().out == "right\nnot yet: of 1: yours 3, expected 2\n"


def test_an_answer_that_raises_is_shown_with_its_line(capsys):
    ddp.judge(check_double, crashes)
    assert capsys.readouterr().out == (
        "not yet: crashes raises an error in its line 3: return half / (number - number)\n"
        "  ZeroDivisionError: float division by zero\n"
    )


def test_an_answer_that_the_check_cannot_use_is_no_traceback(capsys):
    ddp.judge(check_double, lambda number: "two")
    said = capsys.readouterr().out
    assert said.startswith("not yet: the check cannot use what <lambda> returns\n  TypeError: ")


@pytest.mark.parametrize("answer", [..., None, 7])
def test_an_answer_that_is_no_function_is_said_so(capsys, answer):
    ddp.judge(check_double, answer)
    assert "not callable" in capsys.readouterr().out


def test_an_answer_that_fails_on_a_rank_is_shown_with_its_last_lines(capsys):
    def check(answer):
        raise ddp.RankFailed(
            "Rank 1 of 2 on here failed: ZeroDivisionError\n\nmore",
            rank=1,
            host="here",
            traceback='Traceback\n  File "<cell>", line 2, in mine\n    1 / 0\n'
            "ZeroDivisionError: division by zero\n",
        )

    ddp.judge(check, double)
    said = capsys.readouterr().out
    assert said.startswith("not yet: Rank 1 of 2 on here failed: ZeroDivisionError\n")
    assert "    1 / 0\nZeroDivisionError: division by zero" in said and "more" not in said


def test_an_interrupt_is_not_taken_for_an_answer():
    def interrupted(number):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ddp.judge(check_double, interrupted)
