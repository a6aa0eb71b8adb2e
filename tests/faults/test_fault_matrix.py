"""Every fault of the fault lab, at its moments and ranks, with its assertions.

The caller knows what happened, nothing is left, nothing is lost.
"""

import os
import re
import signal
import sys
import threading
import time

import cloudpickle
import fault_lab
import faults_on_purpose as faults
import pytest
from patience import PATIENCE
from processes import TESTS, processes_of

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STALL_TIMEOUT = PATIENCE / 10  # a rank that a busy machine holds up is not one of these
LEFT = "before it had finished"
SAYS = {  # fault: type, exit code, signal, words of the first line
    "raise": (ddp.RankFailed, 1, None, "ValueError: a fault on purpose"),
    "KeyboardInterrupt": (ddp.RankFailed, 1, None, "failed: KeyboardInterrupt"),
    "child with a session of its own": (ddp.RankFailed, 1, None, "ValueError: a fault on purpose"),
    "sys.exit(3)": (ddp.RankFailed, 3, None, f"left with exit code 3 {LEFT}"),
    "os._exit(0)": (ddp.RankFailed, 0, None, f"left with exit code 0 {LEFT}"),
    "kill": (ddp.RankFailed, -9, "SIGKILL", "killed by SIGKILL"),
    "SIGSEGV": (ddp.RankFailed, -11, "SIGSEGV", "killed by SIGSEGV"),
    "stop": (ddp.RankStalled, None, None, "Its process is stopped"),
    "hang": (ddp.RankStalled, None, None, "It is not in a collective"),
    fault_lab.CONDITION: (ddp.RankStalled, None, None, "It has called barrier #"),
    fault_lab.LOADER_WORKER: (ddp.RankFailed, 1, None, "DataLoader worker (pid"),
    "worker killed": (ddp.RankFailed, None, None, "its worker died"),
    fault_lab.NANNY_KILLED: (ddp.RankFailed, None, None, "its worker died"),
    fault_lab.RESULT: (ddp.RankFailed, 1, None, "cannot be pickled"),
    fault_lab.DISK_FULL: (ddp.RankFailed, 1, None, "was not saved: File too large"),
}


@pytest.fixture(scope="module")
def undisturbed(client, tmp_path_factory):
    """The weights of a run that nothing happens to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return ddp.launch(client, faults.train, workers=2, directory=directory).result


def assert_known(outcome, kind, exitcode, signal_name, words):
    assert type(outcome.error) is kind, outcome
    assert words in outcome.said
    found = (outcome.error.rank, outcome.error.exitcode, outcome.error.signal)
    assert found == (outcome.rank, exitcode, signal_name)


def assert_harmless(outcome):
    assert outcome.left == 0
    assert outcome.resumed_equal


@pytest.mark.parametrize(
    ("fault", "when", "rank"), fault_lab.cases(), ids=lambda value: str(value).replace(" ", "_")
)
def test_a_rank_that_fails(client, undisturbed, tmp_path, fault, when, rank):
    outcome = fault_lab.run_case(
        client, fault, when, rank, undisturbed, tmp_path, stall_timeout=STALL_TIMEOUT
    )
    assert_harmless(outcome)
    if fault in SAYS:
        assert_known(outcome, *SAYS[fault])
    elif fault == fault_lab.LEAVES:
        # where rank 0 has left, its peer waits; else gloo tells rank 0 that its peer is gone
        kind = ddp.RankStalled if rank == 0 else ddp.RankFailed
        assert_known(outcome, kind, None, None, "came to its end at step 14, while rank")
    else:  # a tensor of another size, of which gloo may end either rank
        assert isinstance(outcome.error, ddp.RankFailed | ddp.RankStalled)


@pytest.mark.parametrize(
    ("fault", "when"),
    [*((fault_lab.CLIENT_KILLED, when) for when in fault_lab.MOMENTS), (fault_lab.CTRL_C, "step")],
)
def test_a_client_that_ends(client, undisturbed, tmp_path, fault, when):
    outcome = fault_lab.run_client_case(client, fault, when, undisturbed, tmp_path)
    if fault == fault_lab.CLIENT_KILLED:
        assert outcome.said.startswith("(ended by signal 9) The run begins")
        assert "Error" not in outcome.said
    else:
        assert outcome.said.startswith("Interrupted") and str(tmp_path / "run") in outcome.said
    assert_harmless(outcome)


@pytest.mark.parametrize("when", ["start", "save"])
def test_a_scheduler_that_is_killed(client, undisturbed, tmp_path, when):
    outcome = fault_lab.run_cluster_case(
        client, fault_lab.SCHEDULER_KILLED, when, undisturbed, tmp_path
    )
    assert type(outcome.error) is ddp.SchedulerLost
    assert_harmless(outcome)


def test_a_worker_that_is_killed_with_its_nanny(client, undisturbed, tmp_path):
    outcome = fault_lab.run_cluster_case(
        client, fault_lab.NANNY_KILLED, "step", undisturbed, tmp_path
    )
    assert_known(outcome, *SAYS[fault_lab.NANNY_KILLED])
    assert_harmless(outcome)


@pytest.mark.timeout(10 * PATIENCE)
@pytest.mark.parametrize(("kills", "ranks"), [(60, (2,)), (40, (1, 2, 3))])
def test_killed_at_random_times_it_ends_with_the_weights_of_the_undisturbed_run(
    client, tmp_path, kills, ranks
):
    survived = fault_lab.survive_kills(client, tmp_path, kills=kills, ranks=ranks)
    assert survived.kills >= kills and not processes_of(tmp_path / "disturbed")
    assert survived.identical or len(ranks) > 1
    assert survived.difference < 1e-6


def test_more_than_one_sigterm_before_the_first_step_is_as_good_as_one(client):
    def train():
        def terminate_again_and_again():
            while True:
                os.kill(os.getpid(), signal.SIGTERM)

        sys.setswitchinterval(1e-6)  # so that they come in whatever the rank does
        for _ in range(8):
            threading.Thread(target=terminate_again_and_again, daemon=True).start()
        time.sleep(10 * PATIENCE)

    with pytest.raises(ddp.RunStopped, match="All ranks left\\."):
        ddp.launch(client, train, workers=1)


NOTEBOOK = """
import sys
sys.path.append({tests!r})
import torch  # now: an interrupt in the middle of this import would leave half a torch behind
from ddp_common import inject, launch
from faults_on_purpose import train
from distributed import Client
client = Client({address!r})
"""


def test_an_interrupt_in_a_notebook_leaves_nothing_and_the_next_cell_trains(client, tmp_path):
    from kernels import kernel_manager

    manager = kernel_manager()
    manager.start_kernel(env=fault_lab.environment_for(client, tmp_path))
    kernel = manager.blocking_client()
    kernel.start_channels()

    def run(code):
        return kernel.execute_interactive(
            code, timeout=2 * PATIENCE, stop_on_error=False, output_hook=lambda message: None
        )["content"]

    def interrupt():
        while not re.search("step-", str(list((tmp_path / "run").glob("checkpoints/*.pt")))):
            time.sleep(0.05)
        manager.interrupt_kernel()

    try:
        kernel.wait_for_ready(timeout=2 * PATIENCE)
        setup = NOTEBOOK.format(tests=TESTS, address=client.scheduler.address)
        assert run(setup)["status"] == "ok"
        threading.Thread(target=interrupt, daemon=True).start()
        hangs = "inject(train, 'hang', step=8)"
        said = run(f"launch(client, {hangs}, workers=2, directory={str(tmp_path / 'run')!r})")
        assert said["ename"] == "KeyboardInterrupt", "\n".join(said["traceback"])
        assert not processes_of(tmp_path / "run")
        assert run("launch(client, train, workers=2)")["status"] == "ok"
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
