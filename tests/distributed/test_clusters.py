"""Clusters that `connect` starts, and what is left of them after they were closed."""

import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys

import cloudpickle
import psutil
import pytest
from children import children
from dask.system import CPU_COUNT
from distributed import Client
from patience import PATIENCE
from processes import Background, assert_gone, is_alive

import ddp_common as ddp
from dask_ranks.client.rpc import known_workers
from dask_ranks.clusters import connect, protection
from dask_ranks.worker.plugin import tls_contexts

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_the_number_of_workers_comes_from_the_environment_and_closing_leaves_no_process(
    monkeypatch, capfd
):
    monkeypatch.setenv("WORKERS", "2")
    monkeypatch.setenv("DDP_PROGRESS", "bar")
    before = children()
    with ddp.connect() as client:
        assert len(known_workers(client)) == 2
        run = ddp.launch(client, ddp.world_size)
        started = children() - before
        assert f"Dask's dashboard: {client.dashboard_link}" in capfd.readouterr().err
    assert (run.result, run.world_size) == (2, 2)
    assert len(started) >= 3  # each worker, and the process that has torch imported
    assert_gone(lambda: [pid for pid in started if is_alive(pid)])


def test_an_open_client_of_the_same_request_is_given_again_and_no_other(client, monkeypatch):
    assert ddp.connect("local", workers="4") is client
    monkeypatch.setenv("OPTIONS", "threads_per_worker=1")
    with ddp.connect("local", workers=1) as other:
        with ddp.connect("local", workers=2) as third:
            assert len({client, other, third}) == 3
            assert [len(each.workers()) for each in (client, other, third)] == [4, 1, 2]
        with ddp.connect("local", workers=2) as fourth:
            assert fourth is not third


def test_an_inner_with_leaves_the_cluster_to_the_outer_one_until_the_last_has_ended():
    with ddp.connect("local", workers=1) as outer:
        for _ in range(2):
            with ddp.connect("local", workers=1) as inner:
                assert inner is outer
        assert ddp.launch(outer, ddp.world_size).result == 1
    assert outer.status == "closed"
    opened = ddp.connect("local", workers=1)
    with ddp.connect("local", workers=1):
        pass
    assert opened.status == "running"
    opened.close()
    assert opened.status == "closed"
    with pytest.raises(ValueError):  # none of these is Dask's current client any more
        Client.current(allow_global=False)


def test_no_worker_is_missed_while_dask_asks_for_something_else(client):
    async def as_dasks_timer_does():
        while not is_over:
            await client._update_scheduler_info()

    is_over = False
    asking = Background(client.sync, as_dasks_timer_does)
    assert {len(known_workers(client)) for _ in range(300)} == {4}
    is_over = True
    asking.outcome()


def shaken_hands(listening, connecting):
    """Both ends of a new TLS connection; reading never waits."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    later = {"do_handshake_on_connect": False}
    ends = (
        listening.wrap_socket(ends[0], server_side=True, **later),
        connecting.wrap_socket(ends[1], **later),
    )
    for step in (*["do_handshake"] * 3, "recv"):  # which takes in what follows the handshake
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                getattr(end, step)()
    return ends


def test_the_end_of_one_tls_connection_is_not_taken_for_that_of_another(client):
    """With OpenSSL 3.5.9 and 3.6.5 it was, and clusters lost workers at the start."""
    security = protection.credentials()
    contexts = (
        security.get_listen_args("scheduler")["ssl_context"],
        security.get_connection_args("client")["ssl_context"],
    )
    ended, other = shaken_hands(*contexts), shaken_hands(*contexts)
    ended[1].close()
    for _ in range(2):
        assert ended[0].recv(1) == b""
        with pytest.raises(ssl.SSLWantReadError):
            other[0].recv(1)

    def options(dask_worker):
        return [int(context.options) for context in tls_contexts(dask_worker)]

    for of_a_worker in client.run(options).values():
        assert len(of_a_worker) == 2
        assert all(each & ssl.OP_IGNORE_UNEXPECTED_EOF for each in of_a_worker)


def test_a_worker_that_is_killed_while_it_starts_is_told_without_blame_on_options():
    before = children()
    connecting = Background(ddp.connect, "local", workers=1)
    while connecting.is_running():
        for pid in children() - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if "multiprocessing.spawn" in " ".join(process.cmdline()):
                    process.kill()
    words = "local.yaml: distributed.LocalCluster could not be started: .*\n.*one was killed"
    with pytest.raises(ddp.Error, match=words) as caught:
        connecting.outcome()
    assert "with the profile's options" not in str(caught.value)


AS_UNDER_PDB = """
from dask_ranks.clusters import connect

connect.START_TIMEOUT, connect.BUSY_TIMES = 3, 1
del __spec__
if __name__ == "__main__":
    connect.connect("local", workers=2)
"""


def test_a_cluster_whose_processes_cannot_be_started_is_an_error_in_time(tmp_path):
    """Dask before 2026.8 waits for them for ever: a debugger that runs the program starts none."""
    (tmp_path / "program.py").write_text(AS_UNDER_PDB)
    program = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE)
    said = "has not started within 3 s|LocalCluster could not be started"
    assert done.returncode == 1 and re.search(said, done.stderr), done.stderr


def test_a_cluster_has_longer_to_start_where_the_machine_is_busy(monkeypatch, capsys):
    monkeypatch.setattr(connect, "START_TIMEOUT", 0.1)
    monkeypatch.setattr(connect, "BUSY_TIMES", 10_000)
    monkeypatch.setattr(os, "getloadavg", lambda: (10_000.0 * CPU_COUNT, 0.0, 0.0))
    with ddp.connect("local", workers=1) as client:
        assert len(client.workers()) == 1
    assert f"programs want the {CPU_COUNT} cores of this machine" in capsys.readouterr().err
