"""Messages between rank, agent and client arrive as they were; nothing unknown is passed over."""

import dataclasses
import json
import zlib

import pytest

from ddp_common import messages
from ddp_common.messages import (
    CheckpointFailed,
    CheckpointSaved,
    Ended,
    FileKept,
    Line,
    Pace,
    ParameterNorms,
    Position,
    Report,
    Returned,
    Started,
    pack,
    shows_training,
    unpack,
)

TRAVELLING = [
    Position(),
    Position(epoch=1, step=20, samples=320, epochs=2, total_samples=640),
    Report({"time": 1.5, "loss": float("inf"), "steps": 3, "good": True}),
    CheckpointSaved("step-00000003.pt", 2),
    CheckpointFailed("The disk is full."),
    ParameterNorms("/runs/1/checkpoints", 120, [0.5, 1.25], ["model.weight", "model.bias"]),
    Returned(step=7),
    Started(4711, "n01"),
    Line("ünïcode \udcff"),
    Pace(50, 120, 31.5, [204, 208], [3.25, 24.5], 1.5),
    FileKept("samples/1.txt", "run/0/17"),
    Ended("raised", 1, message="ValueError: no", traceback="Traceback …", exception="aGk="),
    Ended("done", 0, result_size=8, result_path="/proc/1/fd/5", result_target="/memfd:x"),
]


def test_messages_arrive_as_they_were_and_in_their_order():
    assert unpack(pack(TRAVELLING)) == TRAVELLING


def test_every_message_to_the_client_is_tried_here():
    to_the_agent = {messages.File, messages.Done, messages.Raised, messages.Stopped}
    known = {
        each
        for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, messages.Message)
    }
    tried = {type(message) for message in TRAVELLING}
    assert known - to_the_agent - {messages.Message} == tried
    assert all(dataclasses.is_dataclass(each) for each in known)


def said(name, **fields):
    return zlib.compress(json.dumps([(name, fields)]).encode())


@pytest.mark.parametrize(
    ("packed", "error"),
    [
        (said("Progress", step=1), KeyError),
        (said("Line", text="a", colour="red"), TypeError),
        (said("Line"), TypeError),
    ],
    ids=["unknown_message", "unknown_field", "missing_field"],
)
def test_what_is_not_known_is_an_error(packed, error):
    with pytest.raises(error):
        unpack(packed)


def test_a_report_a_known_position_and_the_return_show_that_training_has_begun():
    assert shows_training(Report({"loss": 1.0}))
    assert shows_training(Position(step=1))
    assert shows_training(Returned())
    assert not shows_training(Position())
    assert not shows_training(Started(1, "n01"))
    assert not shows_training(Line("step 1"))
