"""The pipes from a rank to its agent: whatever comes through them, or stops half-way, is told."""

import os
import signal
import subprocess
import sys
import time

import cloudpickle
import pytest
from patience import PATIENCE

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LARGE = b"x" * 60_000_000  # while it goes through the pipe, much can happen


class Words(str):
    """Of the script that launches: no agent can import it."""

    __module__ = "__main__"


def end_within_a_message(number):
    subprocess.Popen(["sleep", "1000"], close_fds=False)  # it holds the pipes open
    if os.fork() == 0:  # so does this one
        time.sleep(0.1)
        os.kill(os.getppid(), number)
        time.sleep(1000)
    ddp.save_file("large", LARGE)
    time.sleep(1000)


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [
        (signal.SIGKILL, ddp.RankFailed, "killed by SIGKILL"),
        (signal.SIGSTOP, ddp.RankStalled, "Its process is stopped"),
    ],
)
def test_a_rank_that_stops_within_a_message_is_named_and_its_worker_is_free(
    client, number, error, said
):
    began = time.monotonic()
    with pytest.raises(error, match=said):
        ddp.launch(client, end_within_a_message, workers=1, stall_timeout=5, number=number)
    assert time.monotonic() - began < PATIENCE / 2
    assert ddp.launch(client, ddp.world_size, workers=4).result == 4


def test_a_message_that_the_agent_cannot_read_is_told_and_the_others_arrive(client):
    def train():
        from dask_ranks.messages import Line
        from ddp_common import reporting

        ddp.report(loss=1.0)
        reporting.post(Line(Words("hello")))
        ddp.report(loss=2.0)

    run = ddp.launch(client, train, workers=1)
    assert [record["loss"] for record in run.records] == [1.0, 2.0]
    assert "a message of this rank was lost: " in (run.directory / "log.txt").read_text()
