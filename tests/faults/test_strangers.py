"""Another user of the same host, who finds every port of a run and tries everything there.

Run as root, who can be another user.
"""

import os
import re
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from children import command_line
from ports import free_port
from processes import Background, log_of, rank_pids, wait_until
from strangers import ATTACK, IMPORTS, as_nobody, ports_of
from test_rendezvous import errors, start, start_together, torchrun_variables
from test_without_dask import in_no_hurry

import ddp_common as ddp

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def train(go_on):
    """Sum the ranks until a file is there; then do so in another group, which opens more ports."""
    dist.barrier()
    print("all are in", flush=True)
    while True:
        total = torch.tensor([ddp.rank() + 1.0, float(os.path.exists(go_on))])
        dist.all_reduce(total)
        assert total[0] == 3.0
        if total[1] == 2.0:
            break
        time.sleep(0.02)
    dist.all_reduce(total := torch.ones(1), group=dist.new_group([0, 1]))
    return total.item()


def test_nothing_that_another_user_sends_to_the_ports_of_ranks_runs_stops_or_changes_anything(
    client, tmp_path
):
    marker = Path("/tmp") / f"ddp-stranger-{os.getpid()}"
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    training = Background(
        ddp.launch,
        client,
        train,
        workers=2,
        directory=tmp_path / "run",
        go_on=str(tmp_path / "go"),
    )
    wait_until(lambda: log_of(tmp_path / "run").count("all are in") == 2)
    ports = ports_of(rank_pids(tmp_path / "run"))
    assert len(ports) >= 3
    said = as_nobody(ATTACK, marker, *ports, imports=IMPORTS)
    assert training.is_running(), said
    (tmp_path / "go").write_text("")
    assert training.outcome().result == 2.0
    assert not marker.exists()
    assert said.count("\n") == len(ports)
    connected = [int(line.split()[1]) for line in said.splitlines()]
    # at one port: the kernel lets nobody through to gloo once all ranks are in
    assert len(set(connected) - {0}) == 1, said


def test_the_same_words_are_believed_by_a_store_of_torch(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    as_nobody(ATTACK, tmp_path / "none", store.port, imports=IMPORTS)
    assert store.check(["stop/wanted", "stop/before"])


def test_another_user_who_knows_the_port_takes_no_rank(tmp_path, monkeypatch):
    """As with a plain torchrun: the ranks agree on a secret in their user's home.

    The stranger has this package, and a secret of his own.
    """
    own = {"HOME": str(tmp_path), "DDP_JOIN_TIMEOUT": "200"}
    port = free_port()
    first = start(**torchrun_variables(0, 2, port), **own)
    wait_until(lambda: ports_of([first.pid]))
    said = as_nobody(
        "with ddp.process_group(): print('it is in')",
        imports="import ddp_common as ddp; ddp.process_group",
        DDP_JOIN_TIMEOUT="20",
        DDP_SECRET="a guess",
        **torchrun_variables(1, 2, port),
    )
    assert "does not know the secret of this run" in said and "it is in\n" not in said
    tmp_path.chmod(0o755)
    assert "PermissionError" in as_nobody(f"open({str(tmp_path / '.ddp-secret')!r})")
    assert "PermissionError" in as_nobody(f"open('/proc/{first.pid}/environ')")
    second = start(**torchrun_variables(1, 2, port), **own)
    said = [process.communicate(timeout=200)[0] for process in (first, second)]
    assert said == ["in 0\n", "in 1\n"]


def test_ranks_with_different_secrets_say_so():
    port = free_port()
    variables = [{**torchrun_variables(rank, 2, port), "DDP_SECRET": str(rank)} for rank in (0, 1)]
    first, second = errors(start_together(*variables))
    assert "still missing: rank 1" in first
    assert "does not know the secret of this run" in second
    assert "set DDP_SECRET to the same random text" in second


def test_a_port_scan_while_ranks_join_disturbs_nothing(tmp_path):
    port = free_port()
    variables = {"DDP_SECRET": "s" * 32, "DDP_JOIN_TIMEOUT": "200"}
    first = start(**torchrun_variables(0, 2, port), **variables)
    wait_until(lambda: ports_of([first.pid]))
    silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(200)]
    assert as_nobody(ATTACK, tmp_path / "none", port, imports=IMPORTS).startswith(str(port))
    second = start(**torchrun_variables(1, 2, port), **variables)
    said = [process.communicate(timeout=200)[0] for process in (first, second)]
    assert said == ["in 0\n", "in 1\n"]
    assert len(silent) == 200


OTHER_KEY = """
import ddp_common as ddp
from ddp_common.ranks import rendezvous
with ddp.process_group():
    key = b"of the run" if ddp.rank() == 0 else b"a stranger's"
    rendezvous._prove_to_each_other(rendezvous._place, key)
"""


def test_a_connection_of_gloo_whose_other_end_does_not_know_the_secret_ends_the_run():
    port = free_port()
    processes = [
        start(OTHER_KEY, **torchrun_variables(rank, 2, port), DDP_SECRET="s") for rank in (0, 1)
    ]
    # all of it, since now and then torch has the last line: "terminate called"
    said = [process.communicate(timeout=200)[1] for process in processes]
    assert any("does not know the secret of this run" in each for each in said), said


def test_make_run_with_torchrun_has_no_port_that_answers_another_user(repository, tmp_path):
    marker = Path("/tmp") / f"ddp-stranger-torchrun-{os.getpid()}"
    process = in_no_hurry(repository, tmp_path / "run")
    try:
        saved = (tmp_path / "run" / "checkpoints").glob
        wait_until(lambda: list(saved("*.pt")) or process.poll() is not None, within=180)
        launcher = psutil.Process(process.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        everyone = [each.pid for each in processes]
        command_lines = " ".join(" ".join(command_line(each)) for each in processes)
        assert not re.search(r"[0-9a-f]{64}", command_lines)
        ports = ports_of(everyone)
        assert len(ports) >= 3  # of the store, and of each rank's gloo
        said = as_nobody(ATTACK, marker, *ports, imports=IMPORTS)
        assert said.count("\n") == len(ports) and "Traceback" not in said, said
        words = [line.split() for line in said.splitlines()]
        answers = [bytes.fromhex(each[2]) for each in words if len(each) == 3]
        # our store's own random number and its proof
        assert max(map(len, answers), default=0) <= 64
        metrics = tmp_path / "run" / "metrics.jsonl"
        steps = len(metrics.read_text().splitlines())
        wait_until(lambda: len(metrics.read_text().splitlines()) > steps + 20)
        assert process.poll() is None and not marker.exists()
    finally:
        process.terminate()
        process.communicate(timeout=120)
