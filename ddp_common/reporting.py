"""What a rank tells the client: metrics, files, and where training is.

It does so at any time, without a collective, without waiting: messages go into a sink, which the
launcher has put in (`put_in`). Without one nobody listens, and they are dropped
after the same checks.
"""

import base64
import collections
import contextlib
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ddp_common.errors import Error
from ddp_common.files import check_name, refuse_name_of_the_run

SUMMED = ("step", "samples", "total_samples")  # over all samplers of this rank
IN_EVERY_RECORD = ("epoch", "step", "samples", "batch")  # as far as a sampler counts them
OWN_COLUMNS = ("restart", "rank", "time", "event")  # of every record, written by us
LARGEST_INTEGER = 2**63  # msgpack knows none from here on


@dataclass
class Message:
    """What all messages have in common: plain fields. JSON can hold those for the client."""


@dataclass
class Position(Message):
    """Where training is: it has moved. All fields are None as long as no sampler counts."""

    epoch: int | None = None  # the first is 0
    step: int | None = None  # steps done since the run began
    samples: int | None = None  # of all ranks, seen since the run began
    batch: int | None = None  # samples of the last step, of all ranks
    epochs: int | None = None  # how many there will be
    total_samples: int | None = None
    has_returned: bool = False  # the training function has

    def known(self) -> dict[str, int]:
        """What is known of it, by name."""
        numbers = vars(self) | {"has_returned": None}
        return {name: number for name, number in numbers.items() if number is not None}


@dataclass
class Report(Message):
    """A record of metrics: what `ddp.report` was called with, when and where in training."""

    values: dict[str, Any]


@dataclass
class File(Message):
    """A small file for the run directory."""

    name: str
    base64: str

    def content(self) -> bytes:
        return base64.b64decode(self.base64)


@dataclass
class CheckpointSaved(Message):
    """A checkpoint is on the rank's disk; of those up to this one the newest `keep` stay."""

    name: str  # relative to the folder of the run's checkpoints; absolute if it lies elsewhere
    keep: int


@dataclass
class CheckpointFailed(Message):
    """A checkpoint could not be written. `why` is a sentence for the user."""

    why: str


@dataclass
class Problem(Message):
    """A sentence for the user about something that does not end the run."""

    text: str


# A message may be a function that makes it: the thread that delivers calls it
Postable = Message | Callable[[], Message]


def report(**values: Any) -> None:
    """Send scalars to the client: numbers, or tensors and arrays with one element.

    Also sends epoch, step, samples so far and in this batch (`batch`, of all ranks), if a sampler
    counts them. A terminal shows `loss`, and up to three others beside it. Raises `Error` at once
    for what is no scalar. A tensor on a GPU is read by another thread: training does not wait.
    """
    for name in OWN_COLUMNS:
        if name in values:
            raise Error(
                f"report({name}=…): every record has a column {name!r} already. Choose another "
                "name."
            )
    where = position()
    record: dict[str, Any] = {"time": time.time()}
    record |= {name: where[name] for name in IN_EVERY_RECORD if name in where}
    record |= {_plain(name): _scalar(name, value) for name, value in values.items()}
    post(lambda: Report({name: _number(value) for name, value in record.items()}))


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value  # of a GPU: it waits for that


def save_file(name: str, content: bytes | str) -> None:
    """Send a small file to the run directory under the relative path `name`.

    Raises `Error` for a name that would leave the run directory, or that the run itself uses, and
    for a content that is neither a string nor bytes.
    """
    check_name(name)
    refuse_name_of_the_run(name)
    try:
        as_bytes = content.encode() if isinstance(content, str) else bytes(memoryview(content))
    except TypeError:
        raise Error(
            f"save_file({name!r}, …) takes a string or bytes, not {type(content).__name__}. Write "
            "numbers with json.dumps; a figure or an array into an io.BytesIO, and its getvalue()."
        ) from None
    post(File(_plain(name), base64.b64encode(as_bytes).decode()))


def post(message: Postable) -> None:
    """Queue a message for the client, if there is one."""
    _sink.post(message)


# Where training is


def set_position(whose: Hashable, **position: int) -> None:
    """A sampler says where its training is; the client's progress bar is drawn from it.

    Where several samplers train in turns, steps and samples are those of all of them together:
    they only ever grow.
    """
    _sink.set_position(whose, position)


def set_done(whose: Hashable, counts: dict[str, int]) -> None:
    """A sampler says what was done of its steps before a resume: they count among several's."""
    _sink.count(whose, counts)


def position() -> dict[str, int]:
    """Where training is, as far as a sampler counts it: numbers of a `Position`, by name."""
    return dict(_sink.position)


def made_progress(*_: Any) -> None:
    """Note that this rank makes progress.

    It does so at every step of a sampler or an optimizer, every batch of an evaluation, every
    save; and where collectives end, while nothing else happens.
    """
    _sink.moved()


# What may be reported


def _plain(text: str) -> str:
    """The string itself: of a class of the script (a StrEnum), the agent cannot unpickle it."""
    return str.__str__(text)


def _scalar(name: str, value: Any) -> Any:
    """`value` as a plain number, or as a tensor of a GPU with one element.

    Raises `Error` for anything else.
    """
    if getattr(value, "is_cuda", False) and value.numel() == 1 and not value.is_complex():
        # The thread reads it later: by then training may have changed it
        return value.detach().clone().reshape(())
    number = value
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # it has more elements, or no content
            number = value.item()
    if isinstance(number, bool | float):
        return number
    if isinstance(number, int) and abs(number) < LARGEST_INTEGER:
        return int(number)  # of an IntEnum: the agent has no class of the script
    what = "a larger integer" if isinstance(value, int) else repr(value)[:80]
    if hasattr(value, "shape"):
        what = f"{type(value).__name__} of shape {tuple(value.shape)}"
    raise Error(
        f"report({name}=…) takes a number or a tensor with one element, not {what}. Report a mean "
        "or a sum instead; for anything larger use save_file."
    )


# Where it all goes


class Sink:
    """Takes what this rank says. A launcher puts in one of its own; this one drops it.

    `position` is where training is: epoch, step, samples…; empty before the first step.
    """

    def __init__(self) -> None:
        self.position: dict[str, int] = {}
        self._counts: dict[Hashable, dict[str, int]] = {}  # of each sampler, what is summed
        self._sums: collections.Counter[str] = collections.Counter()

    def post(self, message: Postable) -> None:
        """Take a message, without waiting."""

    def moved(self) -> None:
        """Take note that this rank makes progress."""

    def count(self, whose: Hashable, counts: dict[str, int]) -> None:
        """Have the counts of a sampler in the sums, in place of those that it has said before."""
        self._sums.subtract(self._counts.get(whose, {}))
        self._sums.update(counts)
        self._counts[whose] = counts

    def set_position(self, whose: Hashable, position: dict[str, int]) -> None:
        self.count(whose, {name: position[name] for name in SUMMED})
        if len(self._counts) > 1:
            position = {**position, **{name: self._sums[name] for name in SUMMED}}
        self.position = position
        self.moved()


_sink = Sink()


def put_in(sink: Sink) -> Sink:
    """From now on what this rank says goes into `sink`; returns the one before."""
    global _sink
    before, _sink = _sink, sink
    return before
