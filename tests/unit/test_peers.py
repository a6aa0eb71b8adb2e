"""The benchmark beside peers counts right: lines of code, samples of an epoch, launches, words.

The peers themselves are not needed here.
"""

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "peers"))
import call
import measure
import probe
import task

PEERS = Path(task.__file__).parent
SCRIPT = '''"""A docstring
of two lines."""

import os
from os import (
    path,
)

import probe


# a comment
def main():
    """What it does."""
    text = """one
    two"""
    probe.stepped(text, 0, None)

    return path.join(
        os.sep, text
    )
'''


def line(steps, samples, *, epoch=1, process="1", time=0.0):
    return {
        "steps": steps,
        "samples": samples,
        "epoch": epoch,
        "process": process,
        "time": time,
    }


# Lines of code


def test_only_lines_that_a_user_writes_are_counted():
    assert measure.lines_of_code(SCRIPT) == (6, 4)


@pytest.mark.parametrize("name", measure.PEERS)
def test_every_peer_has_a_script_that_reports_each_step_in_one_line(name):
    source = (PEERS / f"{measure.PEERS[name].script}.py").read_text()
    assert source.count("probe.stepped(model, epoch, samples)") == 1
    assert source.count("probe") == 2  # with its import
    lines, imports = measure.lines_of_code(source)
    assert 10 < lines < 60
    assert 4 < imports < 15


# Samples of an epoch after a resume


def test_a_resume_that_goes_on_where_the_checkpoint_was_sees_every_sample_once():
    first = [line(1, [0, 1]), line(2, [2, 3]), line(3, [4, 5])]
    second = [line(3, [4, 5]), line(4, [6, 7])]
    count = measure.count_samples(first, second, epoch=1, samples=8, broken_at=3)
    assert count == measure.Count(again=1, twice=0, never=0)


def test_samples_of_another_order_are_seen_twice_and_others_never():
    first = [line(1, [0, 1]), line(2, [2, 3])]
    second = [line(3, [0, 1]), line(4, [2, 4])]
    count = measure.count_samples(first, second, epoch=1, samples=8, broken_at=2)
    assert count == measure.Count(again=0, twice=3, never=3)


def test_a_resume_at_the_begin_of_the_epoch_makes_its_steps_again_and_loses_nothing():
    first = [line(4, [0, 1], epoch=0), line(5, [0, 1]), line(6, [2, 3])]
    second = [line(5, [2, 3]), line(6, [0, 1])]
    count = measure.count_samples(first, second, epoch=1, samples=4, broken_at=6)
    assert count == measure.Count(again=2, twice=0, never=0)


def test_a_resumed_run_that_failed_at_its_end_is_counted_and_says_so():
    ran = measure.Ran(0.0, 1.0, -6, "Aborted", [], [line(1, [0])], None)
    assert measure.in_words(measure.Count(8, 1234, 0), ran) == "1,234, 0 (exit code -6)"
    assert measure.in_words(None, ran) == "failed: Aborted"


# Launches and steps


def test_a_launch_ends_with_the_first_step_of_its_last_rank():
    lines = [
        line(1, [], process="1", time=12.0),
        line(1, [], process="2", time=13.0),
        line(2, [], process="2", time=14.0),
        line(1, [], process="3", time=20.5),
        line(1, [], process="4", time=20.25),
    ]
    assert measure.first_steps(lines, [10.0, 20.0]) == [3.0, 0.5]
    assert measure.first_steps(lines[:-1], [10.0, 20.0]) == [3.0, None]


def test_the_first_steps_of_each_process_are_not_timed():
    slow = [line(step, [], process="1", time=100.0 * step) for step in range(measure.FIRST_STEPS)]
    begin = 100.0 * measure.FIRST_STEPS
    quick = [line(step, [], process="1", time=begin + step / 4) for step in range(9)]
    assert measure.step_seconds(slow + quick) == 0.25


# What a caller learns


def ended(output="", error=None, code=1):
    calls = [{"began": 0.0, "ended": 12.5, "error": error}] if error else []
    return measure.Ran(0.0, 14.0, code, output, calls, [], 12.0)


def test_a_caller_learns_from_an_exception_or_from_an_exit_code():
    error = {"type": "RankFailed", "text": f"{probe.MESSAGE}\n  probe.stepped(model"}
    assert measure.learned(ended(error=error)) == ("`RankFailed`", 0.5)
    assert measure.learned(ended()) == ("exit code 1", 2.0)
    assert measure.learned(ended(code=None))[0].startswith("nothing within")
    says = measure.says_message_and_line
    assert measure.place_of(ended(error=error), says) == "in the exception"
    assert measure.place_of(ended(output=error["text"]), says) == "printed"
    assert measure.place_of(ended(), says) == "no"


@pytest.mark.parametrize(
    "text, rank, signal",
    [
        ("Rank 1 of 2 on here failed: killed by SIGKILL", True, True),
        ("  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 2322)", True, True),
        ("[Rank 1 Error Snippet]:\nA worker health check failed.", True, False),
        ("[rank: 1] Seed set to 0\n[rank0]: Connection reset by peer", False, False),
    ],
)
def test_rank_and_signal_are_found_in_what_is_said(text, rank, signal):
    assert (measure.says_rank(text), measure.says_sigkill(text)) == (rank, signal)


def test_a_call_says_what_was_raised_and_from_what():
    def broken():
        try:
            raise ValueError("inside")
        except ValueError as error:
            raise RuntimeError("outside") from error

    launch = call.called(broken, [])
    assert launch["error"] == {"type": "RuntimeError", "text": "outside\ninside"}
    assert launch["began"] <= launch["ended"] <= time.time()
    assert call.called(dict, [])["error"] is None


# The probe


def test_the_weights_say_how_many_steps_they_have(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERS_LOG", str(tmp_path))
    monkeypatch.delenv("PEERS_FAULT", raising=False)
    model = task.Network()
    rows, _, samples = task.data()[:4]
    model(rows).sum().backward()
    probe.stepped(model, 0, samples)
    other = task.Network()
    other.load_state_dict(model.state_dict())
    other(rows)
    probe.stepped(other, 1, samples)
    lines = measure.read_lines(tmp_path)
    assert [each["steps"] for each in lines] == [1, 2]
    assert [each["epoch"] for each in lines] == [0, 1]
    assert lines[0]["samples"] == [0, 1, 2, 3]


def test_no_optimizer_moves_the_count_of_steps():
    model = task.Network()
    rows, classes, _ = task.data()[:8]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.nn.functional.cross_entropy(model(rows), classes).backward()
    optimizer.step()
    assert probe.steps_in(model) == 1


# Peers that are not there


def test_without_any_peer_it_says_how_to_get_them():
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[peers\]'"):
        measure.check_peers({"ddp_common", "torchrun"})
    measure.check_peers({"ddp_common", "torchrun", "accelerate"})


def test_a_peer_that_is_left_out_is_among_the_results():
    installed = set(measure.PEERS) - {"Ray Train"}
    results = measure.left_out(installed, has_slurm=False)
    said = {result["what"].partition(":")[0]: result["ours"] for result in results}
    assert said == {"Ray Train": "not installed", "submitit": "no Slurm here"}
