"""What a rank tells the client: metrics, files, and where training is.

It does so at any time, without a collective, without waiting. What a rank reports goes into a
queue. One thread turns tensors into numbers and hands the messages to the agent, which passes them
on to the client. Four times a second it also says where training is, if it has moved: that is how
the client knows that a rank is alive. A message that fails on its way is told once on stderr, and
those after it arrive. Where the messages go, the launcher says (`start`). Without one (a single
process) nobody listens, and reports are dropped after the same checks.
"""

import base64
import collections
import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ddp_common.errors import Error, first_line
from ddp_common.files import check_name, refuse_name_of_the_run

SUMMED = ("step", "samples", "total_samples")  # over all samplers of this rank
IN_EVERY_RECORD = ("epoch", "step", "samples", "batch")  # as far as a sampler counts them
POSITION_INTERVAL = 0.25  # seconds between two messages on where training is
COLLECTIVES_INTERVAL = 2.0  # seconds without progress between two looks at collectives
OWN_COLUMNS = ("rank", "time", "event")  # of every record, written by us
LARGEST_INTEGER = 2**63  # msgpack knows none from here on

# The messages. JSON can hold those for the client


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
        numbers = {**vars(self)}
        del numbers["has_returned"]
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
Send = Callable[[Message], None]
LastEnded = Callable[[], Hashable]


def report(**values: Any) -> None:
    """Send scalars to the client: numbers, or tensors and arrays with one element.

    Also sends epoch, step, samples so far and in this batch (`batch`, of all ranks), if a sampler
    counts them. A terminal shows `loss`, and up to three others beside it. Raises `Error` at once
    for what is no scalar. A tensor on a GPU is read by another thread: training does not wait.
    """
    record: dict[str, Any] = {"time": time.time()}
    where = position()
    for name in IN_EVERY_RECORD:
        if name in where:
            record[name] = where[name]
    for name, value in values.items():
        record[_column(name)] = _scalar(name, value)
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
    if _reporter.is_heard:
        _reporter.outbox.put(message)


# Where training is


def set_position(whose: Hashable, **position: int) -> None:
    """A sampler says where its training is; the client's progress bar is drawn from it.

    Where several samplers train in turns, steps and samples are those of all of them together:
    they only ever grow.
    """
    _reporter.set_position(whose, position)


def position() -> dict[str, int]:
    """Where training is, as far as a sampler counts it.

    That is epoch, step, samples, batch, epochs, total_samples.
    """
    return dict(_reporter.position)


def made_progress(*_: Any) -> None:
    """Note that this rank makes progress.

    It does so at every step of a sampler or an optimizer, every batch of an evaluation, every
    save; and where collectives end, while nothing else happens.
    """
    _reporter.move()


# What may be reported


def _column(name: str) -> str:
    """The name of a column. Raises `Error` for one that is taken or cannot be written."""
    name = _plain(name)
    if name in OWN_COLUMNS:
        raise Error(
            f"report({name}=…): every record has a column {name!r} already. Choose another name."
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Error(
            f"report(**{{{name!r}: …}}): this name is no valid text. Choose another name."
        ) from None
    return name


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
    if hasattr(value, "shape"):
        what = f"{type(value).__name__} of shape {tuple(value.shape)}"
    elif isinstance(value, int):
        what = "an integer of more than 63 bits"
    else:
        what = repr(value)[:80]
    raise Error(
        f"report({name}=…) takes a number or a tensor with one element, not {what}. Report a mean "
        "or a sum instead; for anything larger use save_file."
    )


# The object that this rank has of all that


class Reporter:
    """A rank's messages on their way, and where its samplers are."""

    def __init__(self, is_heard: bool):
        self.is_heard = is_heard
        self.outbox: queue.SimpleQueue[Postable | None] = queue.SimpleQueue()
        self.position: dict[str, int] = {}  # epoch, step, samples…; empty before the first step
        self.moves = 0  # counts everything that is progress
        self.outer: Reporter | None = None  # of a launch within which this one is
        self._counts: dict[Hashable, dict[str, int]] = {}  # of each sampler, what is summed
        self._sums: collections.Counter[str] = collections.Counter()
        self._has_complained = False

    def set_position(self, whose: Hashable, position: dict[str, int]) -> None:
        counts = {name: position[name] for name in SUMMED}
        self._sums.subtract(self._counts.get(whose, {}))
        self._sums.update(counts)
        self._counts[whose] = counts
        if len(self._counts) > 1:
            position = {**position, **{name: self._sums[name] for name in SUMMED}}
        self.move(position)

    def move(self, position: dict[str, int] | None = None) -> None:
        """Note progress, and where training is now, if it is somewhere else."""
        self.moves += 1
        if position is not None:
            self.position = position
        if self.outer is not None:
            self.outer.move(position)

    def deliver(self, send: Send, last_ended: LastEnded) -> None:
        """Pass messages on until None comes.

        In between, and at the end, say where training is if it has moved.
        """
        moves_told = 0
        told = 0.0  # when that was
        look_at = 0.0  # collectives
        ended = last_ended()  # of them the last
        is_over = False
        while not is_over:
            try:
                message = self.outbox.get(timeout=POSITION_INTERVAL)
            except queue.Empty:
                pass
            else:
                if message is None:
                    is_over = True
                else:
                    self._pass_on(message, send)
            if moves_told == self.moves and time.monotonic() > max(look_at, told):
                look_at = time.monotonic() + COLLECTIVES_INTERVAL
                before, ended = ended, last_ended()
                if ended != before:
                    self.move()
            is_due = is_over or time.monotonic() - told > POSITION_INTERVAL
            if is_due and moves_told != self.moves:
                moves_told = self.moves
                told = time.monotonic()
                self._pass_on(Position(**self.position), send)  # type: ignore[arg-type]

    def _pass_on(self, message: Postable, send: Send) -> None:
        try:
            send(message() if callable(message) else message)
        except Exception as error:  # of CUDA, of the pipe: the next one may arrive all the same
            if not self._has_complained:
                self._has_complained = True
                _complain(error)


def _complain(error: Exception) -> None:
    with contextlib.suppress(Exception):  # the training function has closed or replaced stderr
        print(
            "Warning: not all that this rank reports arrives: "
            f"{type(error).__name__}: {first_line(error)}",
            file=sys.stderr,
            flush=True,
        )


_reporter = Reporter(is_heard=False)  # of this rank; another one for each launch


def start(send: Send, last_ended: LastEnded = lambda: None) -> Callable[[], None]:
    """From now on what this rank reports goes to `send`. The launcher calls it.

    `last_ended` says which of its collectives has ended last: a new one is progress, too. Returns
    a function that sends the rest and ends the thread. A launch within another one, in a script
    that `ddprun` runs, tells that one where training is.
    """
    global _reporter
    before = _reporter
    reporter = _reporter = Reporter(is_heard=True)
    if before.is_heard:
        reporter.outer = before
    thread = threading.Thread(
        target=reporter.deliver, args=(send, last_ended), daemon=True, name="ddp-reports"
    )
    thread.start()

    def finish() -> None:
        global _reporter
        reporter.outbox.put(None)
        thread.join()
        _reporter = before

    return finish


def stop() -> None:
    """Nobody listens any more."""
    global _reporter
    _reporter = Reporter(is_heard=False)
