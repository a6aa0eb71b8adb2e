"""An exercise says what is wrong in words: no bare False, no traceback of the check."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

import ddp_common as ddp
from ddp_common.teaching.shown import HeadAndTail


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


def loops_for_ever(number):
    while True:
        time.sleep(0.01)


def catches_everything(number):
    while True:
        try:
            time.sleep(600)
        except Exception:
            pass


@pytest.mark.parametrize("answer", [loops_for_ever, catches_everything])
def test_an_answer_that_never_ends_is_ended(capsys, answer):
    ddp.judge(check_double, answer, timeout=0.5)
    said = capsys.readouterr().out
    assert said.startswith(f"not yet: {answer.__name__} was ended after 0.5 s. Is there a loop")


def test_an_alarm_of_the_callers_goes_on_after_a_check():
    rung = []
    earlier = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    left, interval = signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        ddp.judge(check_double, double)
        deadline = time.monotonic() + 60
        while not rung and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, earlier)
        signal.setitimer(signal.ITIMER_REAL, left, interval)
    assert rung


def test_an_answer_that_leaves_is_one_more_wrong_answer(capsys):
    ddp.judge(check_double, lambda number: sys.exit(3))
    assert capsys.readouterr().out == (
        "not yet: <lambda> calls sys.exit(3), which would end the notebook\n"
    )


def test_of_a_megabyte_of_output_the_beginning_the_end_and_the_verdict_are_shown(capsys):
    def talks(number):
        print("first", "x" * 2**20, "last")
        return 2 * number

    ddp.judge(check_double, talks)
    said = capsys.readouterr().out
    assert said.startswith("first xxx") and said.endswith("xxx last\nright\n")
    assert "characters left out" in said and len(said) < 5_000


def test_what_is_kept_of_a_stream_is_its_beginning_and_its_end():
    stream = HeadAndTail(10)
    for piece in ("ab", "cdefgh", "ij", "k" * 100, "lm"):
        stream.write(piece)
    assert stream.text() == "abcde\n… [102 characters left out] …\nkkklm"
    short = HeadAndTail(10)
    short.write("0123456789")
    assert short.text() == "0123456789"


def test_a_process_that_an_answer_leaves_behind_is_ended(capsys):
    started = []

    def leaves_one(number):
        started.append(psutil.Popen(["sleep", "1000"]))
        return 2 * number

    bystander = subprocess.Popen(["sleep", "1001"])
    try:
        ddp.judge(check_double, leaves_one)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    for process in started:
        assert process.wait(60) == -signal.SIGKILL
    assert "left behind" in capsys.readouterr().err
