"""What rank, agent and client tell each other: one small type for each message.

Commands go client -> agent -> rank: the client sends each agent one `RankSpec`, and may call the
few functions that `agent`, `spool` and `handover` have for it. Messages come back rank -> agent ->
client. A rank sends them through a pipe (`ranks.pipe`), as pickled objects; the agent gathers what
concerns the client, and sends it as an event of Dask. Promises: `unpack` gives what was packed; a
message or a field that is not known here is an error and never passed over.
"""

import json
import zlib
from dataclasses import dataclass
from typing import Any

# From the client to an agent


@dataclass
class RankSpec:
    """Which rank an agent is to start."""

    attempt: str  # the id of this attempt
    rank: int
    world_size: int
    local_rank: int  # among the ranks of its host
    local_world_size: int
    store: tuple[str, int]  # host and port
    environment: dict[str, str]  # further variables of the rank


@dataclass
class Message:
    """What all messages have in common: plain fields.

    Those that go on to the client (`_TYPES`) are written as JSON. Others, as `File` and a rank's
    last word, only go as far as its agent.
    """


# The agent's answer when the client asks where a rank is


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


# Of psutil's words for a process, those of one that is suspended: by SIGSTOP, by a debugger
SUSPENDED = ("stopped", "tracing-stop")


@dataclass
class Whereabouts:
    """Where a rank is."""

    state: str  # of its process, in psutil's words
    stack: str | None  # of Python, all threads; None if it is suspended and was not woken
    collectives: list[Collective] | None = None  # the latest; None if it does not say


# From the rank


@dataclass
class Position(Message):
    """Where training is: the rank is alive. All fields are None as long as no sampler counts."""

    epoch: int | None = None  # the first is 0
    step: int | None = None  # steps done since the run began
    samples: int | None = None  # of all ranks, seen since the run began
    epochs: int | None = None  # how many there will be
    total_samples: int | None = None

    def known(self) -> dict[str, int]:
        """What is known of it, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class Report(Message):
    """A record of metrics.

    It has what `ddp.report` was called with, and when and where in training that was.
    """

    values: dict[str, Any]


@dataclass
class File(Message):
    """A small file for the run directory.

    It goes to the agent, which keeps the content and sends a `FileKept` instead.
    """

    name: str
    content: bytes


@dataclass
class CheckpointSaved(Message):
    """A checkpoint is on the rank's disk; of those up to this one the newest `keep` stay."""

    name: str  # relative to the folder of the run's checkpoints; absolute if it lies elsewhere
    keep: int


@dataclass
class ParameterNorms(Message):
    """The norm of each parameter of a rank's models, at a save: the client compares the ranks."""

    checkpoint: str  # its folder: a run may have more than one
    step: int
    norms: list[float]
    names: list[str]  # of the parameters; from rank 0 alone


@dataclass
class CheckpointFailed(Message):
    """A checkpoint could not be written. `why` is a sentence for the user."""

    why: str


@dataclass
class Returned(Position):
    """The training function has returned; the fields say where training was then."""


# The rank's last word, to its agent


@dataclass
class Done(Message):
    """All went well.

    `result` is rank 0's pickled result if it could not be written into the file made for it.
    """

    result: bytes | None = None


@dataclass
class Raised(Message):
    """An exception ended the rank.

    `exception` is the pickled exception as base64, None if it cannot travel.
    """

    message: str
    traceback: str
    exception: str | None = None
    exitcode: int | None = None  # with which the process is about to end


@dataclass
class Stopped(Message):
    """The rank has left because some rank got SIGTERM."""

    told: bool  # whether it was this one
    in_loop: bool  # whether training had begun: from then on all ranks leave together
    step: int = 0  # the last step done


LAST_WORDS = (Done, Raised, Stopped)

# The file of a rank's recorded steps: its folder in the run directory, and what is said in it of
# the steps, of those before them that do not count, of its host and of the attempt
RECORDINGS = "trace"
STEPS, LEAD, HOST, ATTEMPT = "ddp_steps", "ddp_lead", "ddp_host", "ddp_attempt"


# From the agent


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
class FileKept(Message):
    """A file for the run directory, on the rank's worker.

    The client fetches it there by its `token`.
    """

    name: str
    token: str


@dataclass
class Ended(Message):
    """The rank's process is gone, and so is all that it has started.

    This is the last message of a rank. `how` is 'done', 'raised', 'stopped', 'exited' (without a
    last word), 'cancelled' (the client did not want it any more), or 'lost', which the client
    notes itself when the rank's worker is gone. The other fields are those of the last word, and
    where rank 0's result is.
    """

    how: str
    exitcode: int | None = None  # negative: the signal that killed it
    message: str = ""
    traceback: str = ""
    exception: str | None = None
    told: bool = False
    in_loop: bool = True
    step: int = 0
    result_size: int | None = None  # bytes of rank 0's pickled result
    # Where a client on the same machine may open it, instead of asking Dask for it
    result_path: str = ""
    # Of that path, which is a link: tells the file from another one of that name
    result_target: str | None = None


# Messages which show that a rank makes progress
PROGRESS = (Report, Position, FileKept, CheckpointSaved, Started)

_TYPES = {
    each.__name__: each
    for each in (
        Position,
        Report,
        CheckpointSaved,
        CheckpointFailed,
        ParameterNorms,
        Returned,
        Started,
        Line,
        FileKept,
        Ended,
    )
}


def shows_training(message: Message) -> bool:
    """Whether a message shows that its rank trains, or had nothing left to do.

    From then on the run goes on with its settings.
    """
    if isinstance(message, Returned | Report):
        return True
    return isinstance(message, Position) and bool(message.known())


def pack(messages: list[Message]) -> bytes:
    """Messages as compressed JSON.

    Worker, scheduler and client each keep some of the last events: these are to be small.
    """
    said = [(type(message).__name__, vars(message)) for message in messages]
    return zlib.compress(json.dumps(said).encode(), level=1)


def unpack(packed: bytes) -> list[Message]:
    """The messages that were packed.

    Raises KeyError for an unknown type, TypeError for an unknown or missing field.
    """
    said = json.loads(zlib.decompress(packed))
    return [_TYPES[name](**fields) for name, fields in said]
