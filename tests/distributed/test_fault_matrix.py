"""Every fault, at every moment, on rank 0 and on another.

The caller knows what happened, nothing is left, nothing is lost.
The cases are those of the fault lab; here each has its assertions.
"""

import datetime
import multiprocessing.util
import os
import re
import signal
import sys
import threading
import time

import cloudpickle
import fault_lab
import psutil
import pytest
from processes import PATIENCE, Background, wait_until

import ddp_common as ddp
from ddp_common.ranks import rendezvous
from ddp_common.teaching import faults
from ddp_common.worker import agent

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STALL_TIMEOUT = 12.0  # seconds: a rank that a busy machine holds up is not one of these
SAYS = {  # fault: type, exit code, signal, words of the first line
    "raise": (ddp.RankFailed, 1, None, "ValueError: a fault on purpose"),
    "KeyboardInterrupt": (ddp.RankFailed, 1, None, "failed: KeyboardInterrupt"),
    "child with a session of its own": (ddp.RankFailed, 1, None, "ValueError: a fault on purpose"),
    "sys.exit(3)": (ddp.RankFailed, 3, None, "left with exit code 3 before its function returned"),
    "os._exit(0)": (ddp.RankFailed, 0, None, "left with exit code 0 before its function returned"),
    "SIGKILL": (ddp.RankFailed, -9, "SIGKILL", "killed by SIGKILL, often because memory ran out"),
    "SIGSEGV": (ddp.RankFailed, -11, "SIGSEGV", "killed by SIGSEGV"),
    "SIGSTOP": (ddp.RankStalled, None, None, "Its process is stopped"),
    "deadlock": (ddp.RankStalled, None, None, "It is not in a collective at step 6"),
    fault_lab.CONDITION: (ddp.RankStalled, None, None, "It has called barrier #"),
    fault_lab.LOADER_WORKER: (ddp.RankFailed, 1, None, "DataLoader worker (pid"),
    "memory limit exceeded": (ddp.RankFailed, None, None, "its worker's limit is 0.75 GiB"),
    "memory limit exceeded by children": (
        ddp.RankFailed,
        None,
        None,
        "that it has started, and its worker's limit is 0.75 GiB",
    ),
    "worker killed": (ddp.RankFailed, None, None, "its worker died"),
    fault_lab.NANNY_KILLED: (ddp.RankFailed, None, None, "its worker died"),
    faults.RESULT: (ddp.RankFailed, 1, None, "cannot be pickled"),
    fault_lab.DISK_FULL: (
        ddp.RankFailed,
        1,
        None,
        "was not saved: File too large. The last good one is none",
    ),
}


@pytest.fixture(scope="module")
def undisturbed(client, tmp_path_factory):
    """The weights of a run that nothing happens to."""
    return ddp.launch(
        client, faults.train, workers=2, directory=tmp_path_factory.mktemp("undisturbed")
    ).result


def assert_known(outcome, kind, exitcode, signal_name, words):
    assert type(outcome.error) is kind, outcome
    assert words in outcome.said
    assert f"Rank {outcome.rank} of 2 on {outcome.error.host} " in outcome.said
    assert (outcome.error.rank, outcome.error.exitcode, outcome.error.signal) == (
        outcome.rank,
        exitcode,
        signal_name,
    )


def assert_harmless(outcome):
    assert outcome.left == 0
    assert outcome.gone < PATIENCE
    assert outcome.resumed_equal


@pytest.mark.parametrize(
    ("fault", "when", "rank"),
    [
        case
        for case in fault_lab.cases()
        if case[0] not in (fault_lab.LEAVES, fault_lab.OTHER_SIZE)
    ],
    ids=lambda value: str(value).replace(" ", "_"),
)
def test_a_rank_that_fails(client, undisturbed, tmp_path, fault, when, rank):
    outcome = fault_lab.run_case(
        client, fault, when, rank, undisturbed, tmp_path, stall_timeout=STALL_TIMEOUT
    )
    assert_known(outcome, *SAYS[fault])
    assert_harmless(outcome)
    assert outcome.told < PATIENCE
    if SAYS[fault][0] is ddp.RankStalled:
        assert set(outcome.error.stacks) == {0, 1}
        assert "faults.py" in outcome.error.stacks[rank]  # where the fault was put
        peer = outcome.error.stacks[1 - rank]
        answered = {0, 1} if fault != "SIGSTOP" else {1 - rank}  # a woken rank has gone on
        if when == "start" and re.search(r"rendezvous\.py.* in _join\b", peer):
            answered -= {1 - rank}  # rank 0 stopped so early that the store in it never answered
        assert set(outcome.error.collectives) == answered
        # the other one is in the step or just before it
        assert when == "start" or re.search("_engine_run_backward|is_time_to_stop", peer)


def test_a_stopped_rank_sleeps_on_until_the_others_have_said_where_they_wait(client, tmp_path):
    def is_stopped():
        log = tmp_path / "run" / "log.txt"
        started = re.search(
            r"rank 1 started: process (\d+)", log.read_text() if log.exists() else ""
        )
        return started and psutil.Process(int(started[1])).status() == psutil.STATUS_STOPPED

    def asked(wake):
        return [answer for answer in client.run(agent.where_is_it, wake=wake).values() if answer]

    stops = faults.inject(faults.train, "SIGSTOP", rank=1, step=6, mark=tmp_path / "mark")
    running = Background(ddp.launch, client, stops, workers=2, directory=tmp_path / "run")
    wait_until(is_stopped)
    assert ("stopped", None) in [(answer.state, answer.stack) for answer in asked(wake=False)]
    assert is_stopped()
    (woken,) = [answer for answer in asked(wake=True) if answer.state == "stopped"]
    assert "faults.py" in woken.stack
    assert running.outcome().world_size == 2  # it was woken, and went on to the end


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_the_loop_one_batch_early_is_named_with_its_step(
    client, undisturbed, tmp_path, rank
):
    outcome = fault_lab.run_case(
        client,
        fault_lab.LEAVES,
        "end",
        rank,
        undisturbed,
        tmp_path,
        stall_timeout=STALL_TIMEOUT,
    )
    assert_known(
        outcome,
        ddp.RankStalled if rank == 0 else ddp.RankFailed,
        None,
        None,
        "function returned at step 14, while rank",
    )
    assert_harmless(outcome)


@pytest.mark.parametrize("when", fault_lab.MOMENTS)
@pytest.mark.parametrize("fault", [fault_lab.CLIENT_KILLED, fault_lab.CTRL_C])
def test_a_client_that_ends(client, undisturbed, tmp_path, fault, when):
    outcome = fault_lab.run_client_case(client, fault, when, undisturbed, tmp_path)
    if fault == fault_lab.CLIENT_KILLED:
        assert outcome.said.strip() == "(ended by signal 9)"
    else:
        assert outcome.said.startswith("Interrupted")
        # the ranks go on until they are ended: whether they save meanwhile is open
        go_on = "Go on from there with the same arguments and the run's directory: ddp.launch("
        nowhere = (
            f"There is no checkpoint to go on from; what there is lies in {tmp_path / 'run'}."
        )
        assert go_on in outcome.said or nowhere in outcome.said
        assert str(tmp_path / "run") in outcome.said
    assert_harmless(outcome)


@pytest.mark.parametrize("when", fault_lab.MOMENTS)
def test_a_scheduler_that_is_killed(client, undisturbed, tmp_path, when):
    outcome = fault_lab.run_cluster_case(
        client, fault_lab.SCHEDULER_KILLED, when, undisturbed, tmp_path
    )
    assert type(outcome.error) is ddp.SchedulerLost
    assert "connect again and launch with directory=" in outcome.said
    assert outcome.error.directory == tmp_path / "run"
    assert_harmless(outcome)


def test_a_worker_that_is_killed_with_its_nanny(client, undisturbed, tmp_path):
    outcome = fault_lab.run_cluster_case(
        client, fault_lab.NANNY_KILLED, "step", undisturbed, tmp_path
    )
    assert_known(outcome, *SAYS[fault_lab.NANNY_KILLED])
    assert_harmless(outcome)


def test_a_full_disk_leaves_training_to_go_on_with_a_warning(client, undisturbed):
    run = ddp.launch(client, faults.train, workers=2, file_limit=2000)
    assert (run.result == undisturbed).all()
    log = (run.directory / "log.txt").read_text()
    assert "was not saved: File too large. The last good one is none" in log
    assert not list((run.directory / "checkpoints").iterdir())


NOTEBOOK = """
import os
import torch  # now: an interrupt in the middle of this import would leave half a torch behind
from ddp_common import launch
from ddp_common.teaching.faults import inject, train
from distributed import Client
client = Client({address!r})
"""


def test_interrupt_in_a_notebook(client, undisturbed, tmp_path):
    from kernels import kernel_manager

    manager = kernel_manager()
    manager.start_kernel(env=fault_lab.environment_for(client, tmp_path))
    kernel = manager.blocking_client()
    kernel.start_channels()
    try:
        kernel.wait_for_ready(timeout=120)
        kernel.execute_interactive(
            NOTEBOOK.format(address=client.scheduler.address),
            timeout=120,
            output_hook=lambda message: None,
        )
        # it waits there for the interrupt
        deadlock = "inject(train, 'deadlock', step=8)"
        running = kernel.execute(
            f"launch(client, {deadlock}, workers=2, directory={str(tmp_path / 'run')!r})",
            stop_on_error=False,  # else it drops what is sent in the moment after the error
        )
        wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("*.pt")))
        manager.interrupt_kernel()
        reply = kernel.get_shell_msg(timeout=PATIENCE)
        while reply["parent_header"].get("msg_id") != running:
            reply = kernel.get_shell_msg(timeout=PATIENCE)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert not fault_lab.processes_of(tmp_path / "run")
        after = kernel.execute_interactive(
            "launch(client, train, workers=2)", timeout=120, output_hook=lambda message: None
        )
        assert after["content"]["status"] == "ok"
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
    resumed = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run")
    assert (resumed.result == undisturbed).all()


def test_sigterm_lets_all_ranks_finish_their_step_save_and_leave(client, undisturbed, tmp_path):
    sigterm = faults.inject(faults.train, "SIGTERM", rank=1, step=4, mark=tmp_path / "mark")
    words = (
        "rank 1 on .* got SIGTERM. All ranks left after step .*; the newest checkpoint is step-"
    )
    with pytest.raises(ddp.RunStopped, match=words) as caught:
        ddp.launch(client, sigterm, workers=2, directory=tmp_path / "run", pause=0.2)
    assert 5 <= caught.value.step < 14
    assert list((tmp_path / "run" / "checkpoints").glob(f"step-{caught.value.step:08d}.*.pt"))
    resumed = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run")
    assert (resumed.result == undisturbed).all()
    assert not resumed.metrics.duplicated(["rank", "step"]).any()  # nothing was done twice


def test_sigterm_to_all_ranks_at_once(client, tmp_path):
    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    def terminated(**arguments):
        own_rank = ddp.rank()
        return faults._run_with_fault(
            faults.train, terminate, own_rank, "step", 3, None, **arguments
        )

    with pytest.raises(ddp.RunStopped, match="rank 0, 1") as caught:
        ddp.launch(client, terminated, workers=2, directory=tmp_path / "run", pause=0.1)
    assert caught.value.step in (4, 5)


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_before_the_first_step_ends_the_run_at_once(client, rank):
    with pytest.raises(ddp.RunStopped, match="before the first step"):
        ddp.launch(
            client, faults.inject(faults.train, "SIGTERM", rank=rank, when="start"), workers=2
        )


@pytest.mark.parametrize("listens", [True, False], ids=["listens", "does_not_listen_yet"])
def test_a_rank_that_waits_deaf_for_one_that_left_before_the_first_step_is_ended(client, listens):
    def train():
        if ddp.rank() == 0:
            rendezvous.current_store().wait(["what nobody sets"], datetime.timedelta(seconds=100))
        if not listens:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    began = time.monotonic()
    with pytest.raises(
        ddp.RunStopped, match="rank 1 on .* got SIGTERM. All ranks left before the first step"
    ):
        ddp.launch(client, train, workers=2)
    assert time.monotonic() - began < PATIENCE


def test_a_rank_that_is_told_to_stop_when_it_has_returned_is_done(client):
    def train():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        multiprocessing.util.Finalize(None, os.kill, (os.getpid(), signal.SIGTERM), exitpriority=0)
        return 7

    assert ddp.launch(client, train, workers=2).result == 7


def test_more_than_one_sigterm_before_the_first_step_is_as_good_as_one(client):
    def train():
        def terminate_again_and_again():
            while True:
                os.kill(os.getpid(), signal.SIGTERM)

        sys.setswitchinterval(1e-6)  # so that they come in whatever the rank does
        for _ in range(8):
            threading.Thread(target=terminate_again_and_again, daemon=True).start()
        time.sleep(PATIENCE)

    with pytest.raises(ddp.RunStopped, match="All ranks left before the first step"):
        ddp.launch(client, train, workers=1)


class TerminatesWhenPickled:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return int, (7,)


class FailsAndTerminates(Exception):
    def __reduce__(self):
        return TerminatesWhenPickled().__reduce__()


def test_sigterm_to_a_rank_without_steps_changes_nothing_once_its_function_has_ended(client):
    assert ddp.launch(client, TerminatesWhenPickled, workers=1).result == 7

    def fail():
        raise FailsAndTerminates("on its own")

    with pytest.raises(ddp.RankFailed, match="FailsAndTerminates: on its own"):
        ddp.launch(client, fail, workers=1)


def chatter_and_deadlock():
    """A rank that waits for ever while a thread of it goes on printing."""

    def chatter():
        while True:
            print("still here", flush=True)
            time.sleep(0.1)

    threading.Thread(target=chatter, daemon=True).start()
    threading.Event().wait()


def test_printing_is_no_progress(client):
    with pytest.raises(ddp.RankStalled, match="no progress for 5 s") as stalled:
        ddp.launch(
            client, faults.inject(faults.train, chatter_and_deadlock), workers=2, stall_timeout=5
        )
    assert "[rank 1] still here" in (stalled.value.directory / "log.txt").read_text()
    assert "in chatter_and_deadlock" in stalled.value.stacks[1]


def test_a_worker_that_dies_right_after_its_rank_has_sent_a_file(client):
    def train():
        ddp.save_file("last.txt", "words")
        time.sleep(0.11)
        if ddp.rank() == 1:
            faults.worker_of_this_rank().kill()
        time.sleep(600)

    with pytest.raises(ddp.RankFailed, match="its worker died"):
        ddp.launch(client, train, workers=2)
