"""The protocol: what client, agent and rank tell each other, one small type for each message.

The client sends each agent one `RankSpec`, and may call the few functions that `agent`, `spool`
and `handover` have for it. Messages come back rank -> agent -> client: a rank sends them through a
pipe (`multiprocessing.Pipe`), and its agent passes them on as events of Dask (`pack`), under the
topic of the attempt. The first is the agent's `Started`, if the rank could be started, the last is
`Ended`: that of the rank, with the exit code of its process, or one of the agent's own. Promises:
`unpack` gives what was packed; a message or a field that is not known here is an error.
"""

import json
import signal
from dataclasses import dataclass
from typing import Any

from ddp_common.reporting import CheckpointSaved, File, Message, Position, Report

TOPIC = "ddp-attempt-"  # of Dask's events, followed by the attempt's id
# The signal by which a rank is asked where it is; SIGUSR1 and SIGUSR2 are the program's
ASK_WHERE = signal.SIGRTMIN + 7

# From the client to an agent


@dataclass
class RankSpec:
    """Which rank an agent is to start."""

    attempt: str  # its id
    rank: int
    variables: dict[str, str]  # of the rank's environment, beside those that its worker knows
    is_script: bool  # its own handler of SIGTERM is called once, however often it is told to stop


# From a rank, or its agent, to the client: these, and those that `ddp_common.reporting` has


@dataclass
class Started(Message):
    """The rank's process is there."""

    pid: int
    host: str


@dataclass
class Line(Message):
    """A line that the rank has printed, or that its agent says about it."""

    text: str


@dataclass
class Collective:
    """A collective that a rank has begun."""

    kind: str  # as torch calls it: all_reduce, barrier, …
    number: int  # among the collectives of its process group, the first is 1
    group: str  # the process group: torch's name for it
    description: str  # of the group: the user's, or else its name
    members: list[int]  # its ranks; empty if unknown
    sizes: list[list[int]]  # of what went in
    dtype: str  # of that, in torch's words: Float, Long, …
    is_between_two: bool  # send or recv: no other rank takes part
    is_finished: bool
    seconds_ago: float  # that it began
    line: str  # of the user's program that called for it, as 'train.py:88'; '' if unknown


@dataclass
class Whereabouts(Message):
    """Where a rank is: its answer when the client asks."""

    stack: str  # of the main thread, innermost call first
    collectives: list[dict[str, Any]] | None  # fields of `Collective`, oldest first
    in_collective: bool = False  # its program has called torch.distributed, or a backward
    in_forward: bool = False  # what it is in is of DDP's own forward: of buffers
    waits_for_loader: bool = False  # for a batch from a worker of a DataLoader


@dataclass
class Ended(Message):
    """The rank's process is gone, and so is all that it has started.

    `how` is 'done', 'raised' (also where it could not be started), 'stopped', 'exited' (without a
    last word), 'cancelled' (the client did not want it any more, or its worker closes), or 'lost',
    which the client notes itself when the rank's worker is gone.
    """

    how: str
    exitcode: int | None = None  # negative: the signal that killed it
    message: str = ""  # why it failed; of one that was told to stop, when; of a lost one, its job
    traceback: str = ""
    exception: str | None = None  # pickled, as base64; None if it cannot travel
    lost_peer: bool = False  # what was raised says no more than that another rank is gone
    got_sigterm: bool = False  # whether it was this rank
    has_begun: bool = True  # whether training had begun: from then on all ranks leave together
    step: int = 0  # the last step done
    result: bytes | None = None  # rank 0's, pickled; for its agent, whose task returns it


# Messages which show that a rank makes progress
PROGRESS = (Started, Position, Report, File, CheckpointSaved)


def shows_training(message: Message) -> bool:
    """Whether a message shows that its rank trains, or had nothing left to do.

    From then on the run goes on with its settings.
    """
    if isinstance(message, Position):
        return message.has_returned or bool(message.known())
    return isinstance(message, Report)


def pack(messages: list[Message]) -> str:
    """Messages as JSON, which any text goes through."""
    return json.dumps([(type(message).__name__, vars(message)) for message in messages])


def unpack(packed: str) -> list[Message]:
    """The messages that were packed.

    Raises KeyError for an unknown type, TypeError for an unknown or missing field.
    """
    types = {each.__name__: each for each in Message.__subclasses__()}
    return [types[name](**fields) for name, fields in json.loads(packed)]
