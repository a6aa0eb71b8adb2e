"""The pipe from a rank to its agent: who reads it waits for nothing that is not there yet."""

import pickle
from multiprocessing import Pipe
from threading import Thread

import pytest

from ddp_common.messages import Ended, File, Report
from ddp_common.ranks import pipe

SMALL = Report({"loss": 1.0})
LARGE = File("weights.bin", "AAEC" * 2_500_000)  # far more than a pipe holds


@pytest.fixture
def ends():
    reading, writing = Pipe(duplex=False)
    with reading, writing:
        yield reading, writing


def test_messages_arrive_whole_and_in_order(ends):
    reading, writing = ends
    sent = [SMALL, LARGE, SMALL, Ended("done", result=b"result")]

    def send():
        for message in sent:
            pipe.write(writing, message)

    sender = Thread(target=send)
    sender.start()
    reader = pipe.Reader(reading)
    received = []
    while len(received) < len(sent):
        assert reading.poll(60)
        received += reader.read()
    sender.join()
    assert received == sent and reader.is_open


def test_a_message_that_is_not_whole_yet_is_waited_for_by_nobody(ends):
    reading, writing = ends
    reader = pipe.Reader(reading)
    assert reader.read() == []
    pickled = pickle.dumps(SMALL)
    content = pipe.LENGTH.pack(len(pickled)) + pickled
    with open(writing.fileno(), "wb", buffering=0, closefd=False) as stream:
        for cut in (3, 20):
            stream.write(content[:cut])
            assert reader.read() == []
            stream.write(content[cut:])
            assert reader.read() == [SMALL]


def test_the_end_is_noticed_also_within_a_message(ends):
    reading, writing = ends
    pipe.write(writing, SMALL)
    with open(writing.fileno(), "wb", buffering=0, closefd=False) as stream:
        stream.write(pipe.LENGTH.pack(100) + b"half")
    writing.close()
    reader = pipe.Reader(reading)
    assert reader.read() == [SMALL]
    assert not reader.is_open
