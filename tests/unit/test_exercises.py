"""An exercise says what is wrong in words: no bare False, no traceback of the check."""

import signal
import subprocess
import time

import psutil

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


def loops_for_ever(number):
    while True:
        time.sleep(0.01)


def test_an_answer_that_never_ends_is_ended(capsys):
    ddp.judge(check_double, loops_for_ever, timeout=0.5)
    said = capsys.readouterr().out
    assert said.startswith("not yet: loops_for_ever was ended after 0.5 s. Is there a loop")


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
