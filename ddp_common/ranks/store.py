"""The store through which ranks meet: keys and values, held by rank 0, for those who know the run's secret and nobody else.

torch's own `TCPStore` answers whoever connects: another user of the host could take a rank, change
what ranks tell each other, or stop the run. Here both ends prove that they know the secret before
either says anything else (HMAC-SHA256 of the other's random number), and every message carries such
a proof as well, so that nobody on the way can change one. What is sent is not encrypted: keep no
secrets in the store. Nothing is unpickled.

Relies on a secret that is hard to guess (`secret`). Promises: a connection that says nothing, or
nonsense, is closed after a while and disturbs nobody; a rank's threads may wait at the same time.
"""

import contextlib
import hmac
import json
import os
import selectors
import socket
import struct
import threading
import time

import torch.distributed as dist

GREETING = b"ddp-store-1\n"
NONCE = MAC = 32  # bytes
HEAD = struct.Struct("!Q")  # the length of what follows a message's proof
HANDSHAKE_TIMEOUT = 10.0  # seconds that a connection has to prove itself
MOST_STRANGERS = 128  # connections that have not yet; one more, and the oldest is closed
ACCEPT_INTERVAL = 0.05  # seconds between two connections once all ranks are in
PIECE = 2**20  # bytes read at once


class StrangerError(ConnectionError):
    """Who answers does not know the run's secret: another program, another run, or another secret."""


def proof(key, *parts):
    return hmac.digest(key, b"".join(parts), "sha256")


class Channel:
    """Messages over a connection whose ends have proved themselves. Each is a JSON list and some bytes."""

    def __init__(self, key, mine, other):
        self.key, self.mine, self.other = key, mine, other
        self.sent = self.received = 0

    def pack(self, message, *blobs):
        head = json.dumps([message, [len(blob) for blob in blobs]]).encode()
        body = b"".join([HEAD.pack(len(head)), head, *blobs])
        number, self.sent = self.sent, self.sent + 1
        return b"".join(
            [HEAD.pack(len(body)), proof(self.key, self.mine, HEAD.pack(number), body), body]
        )

    def unpack(self, mac, body):
        number, self.received = self.received, self.received + 1
        if not hmac.compare_digest(mac, proof(self.key, self.other, HEAD.pack(number), body)):
            raise StrangerError("a message was changed on its way")
        start = HEAD.size + HEAD.unpack_from(body)[0]
        message, lengths = json.loads(body[HEAD.size : start])
        blobs = []
        for length in lengths:
            blobs.append(bytes(body[start : start + length]))
            start += length
        return message, blobs


class Server:
    """Holds the values; one thread of rank 0 answers all. `listener` is a bound socket."""

    def __init__(self, listener, key):
        self.listener, self.key, self.port = listener, key, listener.getsockname()[1]
        self.values, self.waiting = {}, {}
        self.selector = selectors.DefaultSelector()
        self.strangers = {}  # connection -> when it came, oldest first
        self.accept_interval, self.next_accept = 0.0, 0.0
        self.wake, self.told = socket.socketpair()
        for end in (listener, self.wake):
            end.setblocking(False)
            self.selector.register(end, selectors.EVENT_READ)
        self.listening = True
        self.thread = threading.Thread(target=self._serve, daemon=True, name="ddp-store")
        self.thread.start()

    @property
    def address(self):
        """(host, port) by which this host reaches it."""
        host = self.listener.getsockname()[0]
        return {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host), self.port

    def slow_down(self):
        """All ranks are in: whoever else knocks must not cost rank 0 any time."""
        self.accept_interval = ACCEPT_INTERVAL

    def close(self):
        self.told.close()
        self.thread.join()

    def _serve(self):
        while True:
            for key, events in self.selector.select(self._until_next()):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj is self.wake:
                    return self._end()
                else:
                    self._attend(key.data, events)
            self._look_at_strangers()

    def _until_next(self):
        if not self.listening:
            return ACCEPT_INTERVAL
        return HANDSHAKE_TIMEOUT / 4 if self.strangers else None

    def _accept(self):
        try:
            connection, _ = self.listener.accept()
        except OSError:  # it has gone already; or no descriptor is left, and strangers have to go
            self._close_stranger()
            self._pause(ACCEPT_INTERVAL)
        else:
            guest = Guest(connection)
            self.selector.register(connection, selectors.EVENT_READ, guest)
            self.strangers[guest] = time.monotonic()
            if len(self.strangers) > MOST_STRANGERS:
                self._close_stranger()
            if self.accept_interval:
                self._pause(self.accept_interval)

    def _pause(self, seconds):
        self.selector.unregister(self.listener)
        self.listening, self.next_accept = False, time.monotonic() + seconds

    def _look_at_strangers(self):
        now = time.monotonic()
        while self.strangers and now - next(iter(self.strangers.values())) > HANDSHAKE_TIMEOUT:
            self._close_stranger()
        if not self.listening and time.monotonic() >= self.next_accept:
            self.selector.register(self.listener, selectors.EVENT_READ)
            self.listening = True

    def _close_stranger(self):
        """Close the oldest, if there is one."""
        if self.strangers:
            self._close(next(iter(self.strangers)))

    def _close(self, guest):
        self.strangers.pop(guest, None)
        self.selector.unregister(guest.connection)
        guest.connection.close()
        guest.closed = True

    def _end(self):
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        if not self.listening:
            self.listener.close()
        self.selector.close()

    def _attend(self, guest, events):
        if guest.closed:  # a moment ago, to make room
            return
        try:
            if events & selectors.EVENT_WRITE:
                guest.write()
            if events & selectors.EVENT_READ:
                self._read(guest)
        except Exception:  # it has gone, or talks nonsense: whatever it was, the others go on
            self._close(guest)
            return
        self._want(guest)

    def _want(self, guest):
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.unsent else 0)
        if not guest.closed and wanted != guest.wanted:
            self.selector.modify(guest.connection, wanted, guest)
            guest.wanted = wanted

    def _read(self, guest):
        if not guest.fill():
            raise ConnectionError("it has closed the connection")
        while (piece := guest.take()) is not None:
            if guest.channel is None:
                self._greet(guest, piece)
            elif guest.mac is None:
                guest.mac, guest.needed = piece[HEAD.size :], HEAD.unpack_from(piece)[0]
            else:
                message, blobs = guest.channel.unpack(guest.mac, piece)
                guest.mac, guest.needed = None, HEAD.size + MAC
                self._answer(guest, message, blobs)

    def _greet(self, guest, piece):
        if guest.nonces is None:
            if not piece.startswith(GREETING):
                raise StrangerError("another protocol")
            guest.nonces = piece[len(GREETING) :] + os.urandom(NONCE)
            guest.unsent += guest.nonces[NONCE:] + proof(self.key, b"server", guest.nonces)
            guest.needed = MAC
            guest.write()
        elif hmac.compare_digest(piece, proof(self.key, b"client", guest.nonces)):
            session = proof(self.key, b"session", guest.nonces)
            guest.channel, guest.needed = Channel(session, b"server", b"client"), HEAD.size + MAC
            self.strangers.pop(guest, None)
        else:
            raise StrangerError("it does not know the secret")

    def _answer(self, guest, message, blobs):
        number, what, *arguments = message
        if what == "wait":
            lacking = [key for key in arguments[0] if key not in self.values]
            self._reply_when(guest, number, set(lacking), arguments[0] if arguments[1] else [])
            return
        found, values = getattr(self, f"_do_{what}")(*arguments, *blobs)
        self._reply(guest, number, found, values)

    def _reply(self, guest, number, found=None, values=()):
        if not guest.closed:
            guest.unsent += guest.channel.pack([number, found], *values)
            with contextlib.suppress(OSError):  # the next read finds out
                guest.write()
            self._want(guest)

    def _reply_when(self, guest, number, lacking, wanted):
        if not lacking:
            return self._reply(guest, number, None, [self.values[key] for key in wanted])
        request = (guest, number, lacking, wanted)
        for key in lacking:
            self.waiting.setdefault(key, []).append(request)

    def _put(self, key, value):
        self.values[key] = value
        for guest, number, lacking, wanted in self.waiting.pop(key, ()):
            lacking.discard(key)
            if not lacking:
                self._reply(guest, number, None, [self.values.get(each, b"") for each in wanted])

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
        if present == expected or (present is None and not expected):
            self._put(key, desired)
            present = desired
        return None, (expected if present is None else present,)


class Guest:
    """A connection as the server sees it: what it has sent, what it is still to get."""

    def __init__(self, connection):
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a pair of sockets has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.wanted, self.closed = connection, selectors.EVENT_READ, False
        self.received, self.unsent = bytearray(), bytearray()
        self.needed, self.nonces, self.channel, self.mac = len(GREETING) + NONCE, None, None, None

    def fill(self):
        try:
            piece = self.connection.recv(PIECE)
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
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.connection.send(memoryview(self.unsent)[:PIECE].tobytes())]


def connect(host, port, key, timeout):
    """A `Store` at an address. Raises `StrangerError` if who answers does not know the key, else OSError."""
    connection = socket.create_connection((host, port), timeout=timeout)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        nonce = os.urandom(NONCE)
        connection.sendall(GREETING + nonce)
        answer = _read_exactly(connection, NONCE + MAC)
        nonces = nonce + answer[:NONCE]
        if not hmac.compare_digest(answer[NONCE:], proof(key, b"server", nonces)):
            raise StrangerError("who answers there does not know the secret of this run")
        connection.sendall(proof(key, b"client", nonces))
        connection.settimeout(None)
        return Store(connection, Channel(proof(key, b"session", nonces), b"client", b"server"))
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
    """A rank's end: the interface of `torch.distributed.Store`, for its threads side by side.

    `private` is False where there was no secret to know: then anybody may have written what is there.
    """

    private = True

    def __init__(self, connection, channel):
        super().__init__()
        self._connection, self._channel = connection, channel
        self._sending, self._answers, self._number, self._ended = threading.Lock(), {}, 0, None
        threading.Thread(target=self._receive, daemon=True, name="ddp-store-answers").start()

    def _receive(self):
        why = "Connection closed by peer"
        try:
            while True:
                head = _read_exactly(self._connection, HEAD.size + MAC)
                body = _read_exactly(self._connection, HEAD.unpack_from(head)[0])
                (number, found), blobs = self._channel.unpack(head[HEAD.size :], body)
                with self._sending:
                    deliver = self._answers.pop(number, None)
                if deliver is not None:
                    deliver((found, blobs))
        except (OSError, ValueError) as error:
            why = f"{why} ({error})"
        with self._sending:
            self._ended, waiting = why, list(self._answers.values())
            self._answers.clear()
        for deliver in waiting:
            deliver(None)

    def _send(self, deliver, message, blobs=()):
        """Ask; `deliver` is called with the answer, by another thread, or with None if there is none."""
        with self._sending:
            if self._ended is None:
                number = self._number = self._number + 1
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
        answered, answer = threading.Event(), []
        number = self._send(lambda it: (answer.append(it), answered.set()), message, blobs)
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        if not answered.wait(seconds):
            with self._sending:
                self._answers.pop(number, None)
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, {what}")
        if answer[0] is None:
            raise self._lost()
        return answer[0]

    def call_when_set(self, key, function):
        """Have another thread call `function()` as soon as the key is there."""
        self._send(
            lambda answer: function() if answer is not None else None, ["wait", [key], False]
        )

    def close(self):
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def set(self, key, value):
        self.multi_set([key], [value])

    def multi_set(self, keys, values):
        self._ask("set", list(keys), blobs=[_bytes(value) for value in values])

    def get(self, key):
        return self.multi_get([key])[0]

    def multi_get(self, keys, timeout=None):
        return self._ask(
            "wait", list(keys), True, timeout=timeout, what=f"keys: {', '.join(keys)}"
        )[1]

    def wait(self, keys, timeout=None):
        self._ask("wait", list(keys), False, timeout=timeout, what=f"keys: {', '.join(keys)}")

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
        return self._ask("compare", key, blobs=[_bytes(expected), _bytes(desired)])[1][0]

    def has_extended_api(self):
        return True

    def clone(self):
        return self  # its threads do not wait for each other


def _bytes(value):
    return value.encode() if isinstance(value, str) else bytes(value)
