"""The store in which ranks meet: what it answers, and to whom."""

import datetime
import os
import socket
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from ddp_common.ranks import secret, store

KEY = b"k" * 32
SHORT = datetime.timedelta(seconds=0.2)


@pytest.fixture
def server():
    listener = socket.create_server(("127.0.0.1", 0))
    server = store.Server(listener, KEY)
    yield server
    server.close()


@pytest.fixture
def member(server):
    member = store.connect(*server.address, KEY, timeout=10)
    yield member
    member.close()


def test_it_does_what_a_store_of_torch_does(member):
    member.set("a", "1")
    member.multi_set(["b", "c"], [b"2", b"\0\xff"])
    assert member.get("a") == b"1" and member.multi_get(["b", "c"]) == [b"2", b"\0\xff"]
    assert [member.add("n", 2), member.add("n", 3)] == [2, 5]
    assert member.check(["a", "n"]) and not member.check(["a", "x"])
    member.append("a", "+")
    assert member.get("a") == b"1+"
    assert (
        member.compare_set("a", "1+", "new") == b"new"
        and member.compare_set("a", "1+", "x") == b"new"
    )
    assert member.num_keys() == 4 and member.delete_key("a") and not member.delete_key("a")
    under = dist.PrefixStore("group", member)
    under.set("key", "value")
    assert member.get("group/key") == b"value"


def test_waiting_ends_when_the_key_comes_or_time_is_up(server, member):
    other = store.connect(*server.address, KEY, timeout=10)
    threading.Timer(0.1, other.set, ("late", "x" * 3_000_000)).start()
    assert len(member.get("late")) == 3_000_000
    with pytest.raises(dist.DistStoreError, match="never"):
        member.wait(["never"], SHORT)
    assert member.get("late")  # the connection is as good as before


def test_a_call_can_be_had_when_a_key_comes(member):
    called = threading.Event()
    member.call_when_set("stop", called.set)
    assert not called.wait(0.1)
    member.set("stop", "")
    assert called.wait(10)


def test_whoever_waits_for_a_members_word_does_not_wait_for_one_that_has_died(server, member):
    other = store.connect(*server.address, KEY, timeout=10)
    other.set("said/1", "its own")
    other.set_at_the_end(["said/1", "left/1"])
    with pytest.raises(dist.DistStoreError):
        member.wait(["left/1"], SHORT)
    other.close()
    assert member.multi_get(["said/1", "left/1"]) == [b"its own", b""]


def test_when_the_server_ends_waiting_ends(server, member):
    threading.Timer(0.1, server.told.shutdown, (socket.SHUT_RDWR,)).start()
    with pytest.raises(dist.DistNetworkError, match="rank 0, which holds the store, has ended"):
        member.wait(["never"])
    with pytest.raises(dist.DistNetworkError):
        member.set("a", "b")


def test_who_does_not_know_the_secret_is_told_nothing_and_changes_nothing(server, member):
    member.set("a", "1")
    with pytest.raises(store.StrangerError):
        store.connect(*server.address, b"another", timeout=10)
    with socket.create_connection(server.address, timeout=10) as stranger:
        stranger.sendall(store.GREETING + b"n" * store.NONCE)
        assert len(store._read_exactly(stranger, store.NONCE + store.MAC)) == 64
        stranger.sendall(b"m" * store.MAC)  # no proof
        assert stranger.recv(1) == b""
    assert member.list_keys() == ["a"]


def test_a_rank_does_not_trust_a_store_that_does_not_know_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer():
            connection, _ = impostor.accept()
            connection.recv(100)
            connection.sendall(b"x" * (store.NONCE + store.MAC))
            connection.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(store.StrangerError, match="does not know the secret"):
            store.connect(*impostor.getsockname(), KEY, timeout=10)


def test_a_torch_client_of_a_stranger_gets_nowhere(server, member):
    with pytest.raises(dist.DistError):
        dist.TCPStore(
            *server.address,
            None,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=2),
        ).set("a", "b")
    assert member.list_keys() == []


def test_connections_that_say_nothing_or_nonsense_disturb_nobody_and_are_closed(
    server, member, monkeypatch
):
    monkeypatch.setattr(store, "HANDSHAKE_TIMEOUT", 5.0)
    silent = [
        socket.create_connection(server.address, timeout=20)
        for _ in range(store.MOST_STRANGERS + 20)
    ]
    for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), b"\x16\x03\x01\x02\x00\x01\x00"):
        with socket.create_connection(server.address, timeout=20) as scan:
            try:
                scan.sendall(junk)
            except ConnectionError:
                continue
    member.set("a", "1")
    late = store.connect(*server.address, KEY, timeout=20)
    assert late.get("a") == b"1"
    for connection in silent:
        assert connection.recv(1) == b""
    assert not server.strangers


def test_once_all_are_in_knocking_costs_little_and_the_store_still_answers(server, member):
    server.slow_down()
    knocking = threading.Event()

    def knock():
        while not knocking.is_set():
            try:
                socket.create_connection(server.address, timeout=0.2).close()
            except OSError:
                continue

    threading.Thread(target=knock, daemon=True).start()
    for number in range(50):
        member.set(str(number), "x")
    knocking.set()
    assert member.num_keys() == 50


def test_a_message_that_somebody_changes_on_its_way_is_refused(server):
    """A relay that flips one bit of what the rank sends after both ends have proved themselves."""
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def pass_on():
            near, _ = relay.accept()
            far = socket.create_connection(server.address)
            far.sendall(store._read_exactly(near, len(store.GREETING) + store.NONCE))
            near.sendall(store._read_exactly(far, store.NONCE + store.MAC))
            far.sendall(store._read_exactly(near, store.MAC))
            message = bytearray(near.recv(10_000))
            message[-1] ^= 1
            far.sendall(message)
            near.sendall(far.recv(10_000))
            near.close()

        threading.Thread(target=pass_on, daemon=True).start()
        member = store.connect(*relay.getsockname(), KEY, timeout=10)
        with pytest.raises(dist.DistNetworkError):
            member.set("weight", "1")
    assert server.values == {}


# The secret itself


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("CHECKPOINT", "RESUME", secret.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_ranks_agree_on_a_secret_in_a_file_that_only_their_user_reads(home):
    found = [[] for _ in range(8)]
    threads = [
        threading.Thread(target=lambda mine=mine: mine.append(secret.of_this_run()))
        for mine in found
    ]
    for each in [*map(threading.Thread.start, threads), *map(threading.Thread.join, threads)]:
        assert each is None
    (one,) = {mine[0] for mine in found}
    assert len(one) == 64
    assert [path.name for path in home.iterdir()] == [secret.FILE]
    assert (home / secret.FILE).stat().st_mode & 0o777 == 0o600


def test_the_environment_comes_first_then_the_runs_folder(home, tmp_path, monkeypatch):
    at_home = secret.of_this_run()
    monkeypatch.setenv("CHECKPOINT", str(tmp_path / "run"))
    in_run = secret.of_this_run()
    assert in_run != at_home and in_run == (tmp_path / "run" / secret.FILE).read_bytes()
    secret.remove_from_run_directory()
    assert not (tmp_path / "run" / secret.FILE).exists() and secret.of_this_run() != in_run
    monkeypatch.setenv(secret.VARIABLE, "given")
    assert secret.of_this_run() == b"given"


def test_a_file_that_others_can_read_is_no_secret(home, tmp_path, monkeypatch):
    monkeypatch.setenv("CHECKPOINT", str(tmp_path))
    (tmp_path / secret.FILE).write_text("known to all")
    assert secret.of_this_run() == (home / secret.FILE).read_bytes()


NOWHERE = """
import tempfile
tempfile.tempdir = "/proc/nothing"
from ddp_common.ranks import secret
print(secret.of_this_run(), secret.of_this_run())
"""


def test_where_no_file_can_be_made_that_is_said_once(home):
    variables = {**os.environ, "HOME": "/proc/nothing", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", NOWHERE], env=variables, capture_output=True, text=True
    )
    assert done.stdout == "b'' b''\n"
    assert done.stderr.count(f"Set {secret.VARIABLE} to the same random text") == 1
