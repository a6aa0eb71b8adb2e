"""The store through which ranks meet: keys and values, held by rank 0, for the run's ranks only.

torch's own `TCPStore` answers whoever connects: another user of the host could take a rank, change
what ranks tell each other, or stop the run. Here both ends prove that they know the run's secret
before either says anything else (HMAC-SHA256 of the other's random number), and every message
carries such a proof as well, so that nobody in between can change one. Messages are not encrypted:
keep no secrets in the store. Nothing is unpickled.

Relies on a secret that is hard to guess (`secret`). Promises: a connection that says nothing, or
nonsense, is closed after a while and disturbs nobody; several threads of a rank may wait at the
same time.
"""

import contextlib
import datetime
import hmac
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

GREETING = b"ddp-store-1\n"
NONCE = 32  # bytes of the random number over which the other end has to make a proof
MAC = 32  # bytes of a proof
HEAD = struct.Struct("!Q")  # the length of what follows a message's proof
HANDSHAKE_TIMEOUT = 10.0  # seconds that a connection has to prove itself
MOST_STRANGERS = 128  # connections that have not done so; with one more, the oldest is closed
ACCEPT_INTERVAL = 0.05  # seconds between two connections once all ranks are in
PIECE = 2**20  # bytes read at once


class StrangerError(ConnectionError):
    """Whoever answers does not know the run's secret: another program, another run or secret."""


def proof(key: bytes, *parts: bytes) -> bytes:
    """That whoever made it knows `key`: the HMAC-SHA256 of `parts`, 32 bytes."""
    return hmac.digest(key, b"".join(parts), "sha256")


class Channel:
    """Messages over a connection whose ends have proved themselves.

    A message is a JSON list and some blobs (bytes). It travels as length, proof and body; the body
    is the length of its head, the head (the message and the lengths of the blobs) and the blobs.
    The proof covers the message's number, so that none can be repeated or left out.
    """

    def __init__(self, key: bytes, mine: bytes, other: bytes):
        self.key = key
        self.mine = mine  # the name of this end, which is part of its proofs
        self.other = other
        self.sent = 0
        self.received = 0

    def pack(self, message: list, *blobs: bytes) -> bytes:
        head = json.dumps([message, [len(blob) for blob in blobs]]).encode()
        body = b"".join([HEAD.pack(len(head)), head, *blobs])
        number = HEAD.pack(self.sent)
        self.sent += 1
        mac = proof(self.key, self.mine, number, body)
        return b"".join([HEAD.pack(len(body)), mac, body])

    def unpack(self, mac: bytes, body: bytes) -> tuple[list, list[bytes]]:
        """(the message, its blobs). Raises `StrangerError` if the proof is wrong."""
        number = HEAD.pack(self.received)
        self.received += 1
        if not hmac.compare_digest(mac, proof(self.key, self.other, number, body)):
            raise StrangerError("a message was changed on its way")
        (length_of_head,) = HEAD.unpack_from(body)
        start = HEAD.size + length_of_head
        message, lengths = json.loads(body[HEAD.size : start])
        blobs = []
        for length in lengths:
            blobs.append(bytes(body[start : start + length]))
            start += length
        return message, blobs


class Server:
    """Holds the values; one thread of rank 0 answers everybody. `listener` is a bound socket."""

    def __init__(self, listener: socket.socket, key: bytes):
        self.listener = listener
        self.key = key
        self.port = listener.getsockname()[1]
        self.values: dict[str, bytes] = {}
        self.waiting: dict[str, list[tuple]] = {}  # key -> the requests that wait for it
        # Connection without a proof so far -> when it came, oldest first
        self.strangers: dict[Connection, float] = {}
        self.accept_interval = 0.0
        self.next_accept = 0.0
        self.selector = selectors.DefaultSelector()
        self.wake, self.told = socket.socketpair()  # closing `told` ends the thread
        for end in (listener, self.wake):
            end.setblocking(False)
            self.selector.register(end, selectors.EVENT_READ)
        self.listening = True
        self.thread = threading.Thread(target=self._serve, daemon=True, name="ddp-store")
        self.thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) by which this host reaches it."""
        host = self.listener.getsockname()[0]
        to_this_host = {"::": "::1", "0.0.0.0": "127.0.0.1"}
        return to_this_host.get(host, host), self.port

    def slow_down(self) -> None:
        """All ranks are in: from now on, whoever else connects must not cost rank 0 any time."""
        self.accept_interval = ACCEPT_INTERVAL

    def close(self) -> None:
        """End the thread; the ranks' connections are closed."""
        self.told.close()
        self.thread.join()

    def _serve(self):
        while True:
            for key, events in self.selector.select(self._seconds_to_next_check()):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj is self.wake:
                    return self._close_everything()
                else:
                    self._attend(key.data, events)
            self._check_the_time()

    def _seconds_to_next_check(self):
        if not self.listening:
            return ACCEPT_INTERVAL
        return HANDSHAKE_TIMEOUT / 4 if self.strangers else None

    def _check_the_time(self):
        """Close strangers that have taken too long, and listen again after a pause."""
        now = time.monotonic()
        while self.strangers:
            arrival_of_oldest = next(iter(self.strangers.values()))
            if now - arrival_of_oldest <= HANDSHAKE_TIMEOUT:
                break
            self._close_oldest_stranger()
        if not self.listening and time.monotonic() >= self.next_accept:
            self.selector.register(self.listener, selectors.EVENT_READ)
            self.listening = True

    # Connections come and go.

    def _accept(self):
        try:
            end, _ = self.listener.accept()
        except OSError:  # it has gone already, or there is no descriptor left: strangers must go
            self._close_oldest_stranger()
            self._pause_listening(ACCEPT_INTERVAL)
            return
        connection = Connection(end)
        self.selector.register(end, selectors.EVENT_READ, connection)
        self.strangers[connection] = time.monotonic()
        if len(self.strangers) > MOST_STRANGERS:
            self._close_oldest_stranger()
        if self.accept_interval:
            self._pause_listening(self.accept_interval)

    def _pause_listening(self, seconds):
        self.selector.unregister(self.listener)
        self.listening = False
        self.next_accept = time.monotonic() + seconds

    def _close_oldest_stranger(self):
        if self.strangers:
            self._close(next(iter(self.strangers)))

    def _close(self, connection):
        self.strangers.pop(connection, None)
        self.selector.unregister(connection.socket)
        connection.socket.close()
        connection.closed = True
        for key in connection.keys_at_its_end:
            if key not in self.values:
                self._put(key, b"")

    def _close_everything(self):
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        if not self.listening:
            self.listener.close()
        self.selector.close()

    # What a connection sends.

    def _attend(self, connection, events):
        if connection.closed:  # in this same round, to make room
            return
        try:
            if events & selectors.EVENT_WRITE:
                connection.write()
            if events & selectors.EVENT_READ:
                self._read(connection)
        except Exception:  # it has gone, or talks nonsense: whatever it was, the others go on
            self._close(connection)
            return
        self._update_events(connection)

    def _update_events(self, connection):
        """Have the selector watch for what this connection waits for."""
        events = selectors.EVENT_READ
        if connection.unsent:
            events |= selectors.EVENT_WRITE
        if not connection.closed and events != connection.events:
            self.selector.modify(connection.socket, events, connection)
            connection.events = events

    def _read(self, connection):
        if not connection.fill():
            raise ConnectionError("it has closed the connection")
        while True:
            piece = connection.take()
            if piece is None:
                return
            if connection.channel is None:
                self._shake_hands(connection, piece)
            elif connection.mac is None:
                (connection.needed,) = HEAD.unpack_from(piece)
                connection.mac = piece[HEAD.size :]
            else:
                message, blobs = connection.channel.unpack(connection.mac, piece)
                connection.mac = None
                connection.needed = HEAD.size + MAC
                self._answer(connection, message, blobs)

    def _shake_hands(self, connection, piece):
        """First a greeting with a random number, then the proof: see `connect`."""
        if connection.nonces is None:
            if not piece.startswith(GREETING):
                raise StrangerError("another protocol")
            theirs = piece[len(GREETING) :]
            mine = os.urandom(NONCE)
            connection.nonces = theirs + mine
            connection.unsent += mine + proof(self.key, b"server", connection.nonces)
            connection.needed = MAC
            connection.write()
        elif hmac.compare_digest(piece, proof(self.key, b"client", connection.nonces)):
            session = proof(self.key, b"session", connection.nonces)
            connection.channel = Channel(session, b"server", b"client")
            connection.needed = HEAD.size + MAC
            self.strangers.pop(connection, None)
        else:
            raise StrangerError("it does not know the secret")

    # What it is answered.

    def _answer(self, connection, message, blobs):
        number, what, *arguments = message
        if what == "wait":
            self._reply_once_set(connection, number, *arguments)
            return
        if what == "at end":
            (connection.keys_at_its_end,) = arguments
            self._reply(connection, number)
            return
        answer = getattr(self, f"_do_{what}")
        result, values = answer(*arguments, *blobs)
        self._reply(connection, number, result, values)

    def _reply(self, connection, number, result=None, values=()):
        if connection.closed:
            return
        connection.unsent += connection.channel.pack([number, result], *values)
        with contextlib.suppress(OSError):  # the next read finds out
            connection.write()
        self._update_events(connection)

    def _reply_once_set(self, connection, number, keys, with_values):
        """Reply as soon as all keys are there, with their values if those are asked for."""
        missing = {key for key in keys if key not in self.values}
        wanted = keys if with_values else []
        if not missing:
            self._reply(connection, number, None, [self.values[key] for key in wanted])
            return
        request = (connection, number, missing, wanted)
        for key in missing:
            self.waiting.setdefault(key, []).append(request)

    def _put(self, key, value):
        self.values[key] = value
        for connection, number, missing, wanted in self.waiting.pop(key, ()):
            missing.discard(key)
            if not missing:
                values = [self.values.get(each, b"") for each in wanted]
                self._reply(connection, number, None, values)

    def _do_set(self, keys, *values):
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)
        return None, ()

    def _do_add(self, key, amount):
        total = int(self.values.get(key, b"0")) + amount
        self._put(key, str(total).encode())
        return total, ()

    def _do_check(self, keys):
        return all(key in self.values for key in keys), ()

    def _do_delete(self, key):
        return self.values.pop(key, None) is not None, ()

    def _do_keys(self):
        return list(self.values), ()

    def _do_append(self, key, value):
        self._put(key, self.values.get(key, b"") + value)
        return None, ()

    def _do_compare(self, key, expected, desired):
        present = self.values.get(key)
        if present is None:
            is_as_expected = not expected
        else:
            is_as_expected = present == expected
        if is_as_expected:
            self._put(key, desired)
            return None, (desired,)
        return None, (expected if present is None else present,)


class Connection:
    """A connection as the server sees it: what it has sent, what it is still to get."""

    def __init__(self, end):
        end.setblocking(False)
        with contextlib.suppress(OSError):  # a pair of sockets has no such option
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = end
        self.closed = False
        self.events = selectors.EVENT_READ  # that the selector watches for
        self.received = bytearray()
        self.unsent = bytearray()
        self.needed = len(GREETING) + NONCE  # bytes of the next piece
        self.nonces = None  # both random numbers, from the greeting on
        self.channel = None  # from the proof on
        self.mac = None  # of the message whose body comes next
        self.keys_at_its_end: list[str] = []  # to be set when the connection has ended

    def fill(self):
        """Receive what is there. False if the other end has closed."""
        try:
            piece = self.socket.recv(PIECE)
        except BlockingIOError:
            return True
        self.received += piece
        return bool(piece)

    def take(self):
        """The next `needed` bytes, None as long as they are not all there."""
        if len(self.received) < self.needed:
            return None
        piece = bytes(self.received[: self.needed])
        del self.received[: self.needed]
        return piece

    def write(self):
        """Send what the socket takes now."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                piece = memoryview(self.unsent)[:PIECE].tobytes()
                sent = self.socket.send(piece)
                del self.unsent[:sent]


def connect(host: str, port: int, key: bytes, timeout: float) -> "Store":
    """A `Store` at an address; `timeout` is in seconds.

    Raises `StrangerError` if whoever answers does not know the key, else OSError.
    """
    connection = socket.create_connection((host, port), timeout=timeout)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        mine = os.urandom(NONCE)
        connection.sendall(GREETING + mine)
        answer = _read_exactly(connection, NONCE + MAC)
        theirs = answer[:NONCE]
        nonces = mine + theirs
        if not hmac.compare_digest(answer[NONCE:], proof(key, b"server", nonces)):
            raise StrangerError("who answers there does not know the secret of this run")
        connection.sendall(proof(key, b"client", nonces))
        connection.settimeout(None)
        session = proof(key, b"session", nonces)
        return Store(connection, Channel(session, b"client", b"server"))
    except BaseException:
        connection.close()
        raise


def _read_exactly(connection, count):
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(min(PIECE, count - len(received)))
        if not piece:
            raise ConnectionError("it closed the connection")
        received += piece
    return bytes(received)


class Store(dist.Store):
    """A rank's end: the interface of `torch.distributed.Store`, for several threads at once.

    Requests are numbered. A thread of the store's own receives the answers and hands each to
    whoever asked. Methods raise `DistStoreError` when time is up, `DistNetworkError` when the
    server has gone. `private` is False if there was no secret to know: then anybody may have
    written what is there.
    """

    private = True

    def __init__(self, connection: socket.socket, channel: Channel):
        super().__init__()
        self._connection = connection
        self._channel = channel
        self._lock = threading.Lock()  # for sending, and for the attributes below
        self._number = 0  # of the last request
        self._answers: dict[int, Callable] = {}  # request that waits -> what takes its answer
        self._ended = None  # why the connection has ended
        threading.Thread(target=self._receive, daemon=True, name="ddp-store-answers").start()

    def _receive(self):
        why = "Connection closed by peer"
        try:
            while True:
                self._receive_answer()
        except (OSError, ValueError) as error:
            why = f"{why} ({error})"
        with self._lock:
            self._ended = why
            waiting = list(self._answers.values())
            self._answers.clear()
        for deliver in waiting:
            deliver(None)

    def _receive_answer(self):
        head = _read_exactly(self._connection, HEAD.size + MAC)
        (length,) = HEAD.unpack_from(head)
        body = _read_exactly(self._connection, length)
        (number, result), blobs = self._channel.unpack(head[HEAD.size :], body)
        with self._lock:
            deliver = self._answers.pop(number, None)
        if deliver is not None:
            deliver((result, blobs))

    def _send(self, deliver, message, blobs=()):
        """Send a request; returns its number.

        Another thread calls `deliver` with the answer, or with None if there will be none.
        """
        with self._lock:
            if self._ended is None:
                self._number += 1
                number = self._number
                self._answers[number] = deliver
                try:
                    self._connection.sendall(self._channel.pack([number, *message], *blobs))
                    return number
                except OSError as error:
                    del self._answers[number]
                    self._ended = f"Connection closed by peer ({error})"
        raise self._lost()

    def _lost(self):
        return dist.DistNetworkError(f"{self._ended}: rank 0, which holds the store, has ended.")

    def _ask(self, *message, blobs=(), timeout=None, what="an answer"):
        """Send a request and wait; returns (result, blobs)."""
        answered = threading.Event()
        answer = None

        def deliver(received):
            nonlocal answer
            answer = received
            answered.set()

        number = self._send(deliver, message, blobs)
        if timeout is None:
            timeout = self.timeout
        seconds = timeout.total_seconds()
        if not answered.wait(seconds):
            with self._lock:
                self._answers.pop(number, None)
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, {what}")
        if answer is None:
            raise self._lost()
        return answer

    def _ask_to_wait(self, keys, with_values, timeout):
        what = f"keys: {', '.join(keys)}"
        return self._ask("wait", list(keys), with_values, timeout=timeout, what=what)

    def call_when_set(self, key: str, function) -> None:
        """Have another thread call `function()` as soon as the key is there."""

        def deliver(answer):
            if answer is not None:
                function()

        self._send(deliver, ["wait", [key], False])

    def set_at_the_end(self, keys: list[str]) -> None:
        """Have the server set these keys, if they are not there yet, when this connection ends.

        So whoever waits for a rank's word does not wait for a rank that has died. The server sees
        that end when the rank's host says so, not when the host is cut off.
        """
        self._ask("at end", list(keys))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    # The interface of torch's stores. Values are str or bytes; what comes back is bytes.

    def set(self, key, value):
        self.multi_set([key], [value])

    def multi_set(self, keys, values):
        self._ask("set", list(keys), blobs=[_bytes(value) for value in values])

    def get(self, key):
        return self.multi_get([key])[0]

    def multi_get(self, keys, timeout: datetime.timedelta | None = None):
        _, values = self._ask_to_wait(keys, True, timeout)
        return values

    def wait(self, keys, timeout: datetime.timedelta | None = None):
        self._ask_to_wait(keys, False, timeout)

    def add(self, key, amount):
        return self._ask("add", key, amount)[0]

    def check(self, keys):
        return self._ask("check", list(keys))[0]

    def delete_key(self, key):
        return self._ask("delete", key)[0]

    def list_keys(self):
        return self._ask("keys")[0]

    def num_keys(self):
        return len(self.list_keys())

    def append(self, key, value):
        self._ask("append", key, blobs=[_bytes(value)])

    def compare_set(self, key, expected, desired):
        _, values = self._ask("compare", key, blobs=[_bytes(expected), _bytes(desired)])
        return values[0]

    def has_extended_api(self):
        return True

    def clone(self):
        return self  # its threads do not wait for each other


def _bytes(value):
    return value.encode() if isinstance(value, str) else bytes(value)
