"""What a rank tells the client: metrics, files, and where training is.

It does so at any time, without a collective, without waiting. What a rank reports goes into a
queue. One thread turns tensors into numbers and hands the messages to the agent, which passes them
on to the client (see `ddp_common.messages`). Ten times a second it also says where training is, if
it has moved: that is how the client knows that a rank is alive. Without an agent (a single
process) nobody listens, and reports are dropped after the same checks.
"""

import base64
import collections
import decimal
import numbers
import queue
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy

from ddp_common.errors import Error
from ddp_common.files import check_name, refuse_name_of_the_run
from ddp_common.messages import File, Message, Position, Report

SUMMED = ("step", "samples", "total_samples")  # over all samplers of this rank
IN_EVERY_RECORD = ("epoch", "step", "samples")  # as far as a sampler counts them
POSITION_INTERVAL = 0.1  # seconds between two messages on where training is
OWN_COLUMNS = ("rank", "time", "event")  # of every record, written by us
LARGEST_INTEGER = 2**63  # msgpack knows none from here on

_outbox: queue.SimpleQueue | None = None  # this rank's messages; None when nobody listens
_position: dict[str, int] = {}  # epoch, step, samples…: kept up to date by the samplers
_positions: dict[Hashable, dict] = {}  # the same of each sampler, by its name
_sums: collections.Counter = collections.Counter()  # of their numbers, and how many know no total
_moves = 0  # counts everything that is progress


def report(**values: Any) -> None:
    """Send scalars to the client: numbers, or tensors with one element.

    Also sends epoch and step, if a sampler counts them. Raises `Error` at once for anything that
    is not a scalar. A tensor on a GPU is read by another thread: training does not wait for it.
    """
    record: dict[str, Any] = {"time": time.time()}
    for name in IN_EVERY_RECORD:
        if name in _position:
            record[name] = _position[name]
    for name, value in values.items():
        record[name] = _scalar(name, value)
    post(lambda: Report({name: _number(value) for name, value in record.items()}))


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value  # of a GPU: it waits for that


def save_file(name: str, content: bytes | str) -> None:
    """Send a small file to the run directory under the relative path `name`.

    Raises `Error` for a name that would leave the run directory, or that the run itself uses.
    """
    check_name(name)
    refuse_name_of_the_run(name)
    as_bytes = content.encode() if isinstance(content, str) else bytes(content)
    post(File(name, base64.b64encode(as_bytes).decode()))


def post(message: Message | Callable[[], Message]) -> None:
    """Queue a message for the client, if there is one.

    It may be a function that makes the message: the thread that delivers calls it.
    """
    if _outbox is not None:
        _outbox.put(message)


# Where training is


def set_position(whose: Hashable = None, **place: int | None) -> None:
    """A sampler says where its training is; the client's progress bar is drawn from it.

    Where several samplers train in turns, steps and samples are those of all of them together:
    they only ever grow.
    """
    global _position
    before = _positions.get(whose)
    _positions[whose] = place
    for name in SUMMED:
        _sums[name] += place.get(name) or 0
        if before is not None:
            _sums[name] -= before.get(name) or 0
    _sums["without_total"] += _has_no_total(place)
    if before is not None:
        _sums["without_total"] -= _has_no_total(before)

    together = place
    if len(_positions) > 1:
        together = {**place, **{name: _sums[name] for name in SUMMED}}
    if _sums["without_total"]:
        together = {**together, "total_samples": None, "epochs": None}
    _position = {name: value for name, value in together.items() if value is not None}
    made_progress()


def _has_no_total(place: dict) -> bool:
    return place.get("total_samples") is None


def steps_of_others(whose: Hashable) -> int:
    """The steps that all samplers but this one have done."""
    return _sums["step"] - _positions.get(whose, {}).get("step", 0)


def position() -> dict[str, int]:
    """Where training is, as far as a sampler counts it.

    That is epoch, step, samples, epochs, total_samples.
    """
    return dict(_position)


def made_progress(*_: Any) -> None:
    """Note that this rank makes progress.

    It does so at every step of a sampler or an optimizer, every batch of an evaluation, every
    save.
    """
    global _moves
    _moves += 1


# What may be reported


def _scalar(name: str, value: Any) -> Any:
    """`value` as a plain number, or as a tensor of a GPU with one element.

    Raises `Error` for anything else.
    """
    if name in OWN_COLUMNS:
        raise Error(
            f"report({name}=…): every record has a column {name!r} already. Choose another name."
        )
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, (bool, int)) and abs(value) < LARGEST_INTEGER:
        return value
    if isinstance(value, (numbers.Real, decimal.Decimal)):
        try:
            return float(value)
        except (ValueError, OverflowError) as error:
            raise Error(
                f"report({name}=…): this {type(value).__name__} does not fit into a float "
                f"({error})."
            ) from None
    if _has_one_real_element(value):
        return value.detach().reshape(()) if value.is_cuda else value.item()
    if hasattr(value, "shape"):
        what = f"a tensor of shape {tuple(value.shape)}"
    else:
        what = repr(value)[:80]
    raise Error(
        f"report({name}=…) takes a number or a tensor with one element, not {what}. Report a mean "
        "or a sum instead; for anything larger use save_file."
    )


def _has_one_real_element(value: Any) -> bool:
    is_tensor = hasattr(value, "detach") and hasattr(value, "is_meta")
    return is_tensor and value.numel() == 1 and not value.is_complex() and not value.is_meta


# The thread that delivers


def start(send: Callable[[Message], None]) -> Callable[[], None]:
    """Give this rank an outbox whose messages go to `send`.

    Returns a function that sends the rest and ends the thread.
    """
    global _outbox, _position
    outbox: queue.SimpleQueue = queue.SimpleQueue()
    _outbox = outbox
    _positions.clear()  # of an earlier launch in this process
    _sums.clear()
    _position = {}
    thread = threading.Thread(
        target=_deliver, args=(outbox, send), daemon=True, name="ddp-reports"
    )
    thread.start()

    def finish() -> None:
        outbox.put(None)
        thread.join()

    return finish


def stop() -> None:
    """Nobody listens any more."""
    global _outbox
    _outbox = None


def _deliver(outbox: queue.SimpleQueue, send: Callable[[Message], None]) -> None:
    """Pass messages on until None comes.

    In between, and at the end, say where training is if it has moved.
    """
    moves_told = _moves
    told = 0.0  # when that was
    is_over = False
    while not is_over:
        try:
            message = outbox.get(timeout=POSITION_INTERVAL)
        except queue.Empty:
            pass
        else:
            if message is None:
                is_over = True
            else:
                send(message() if callable(message) else message)
        is_due = is_over or time.monotonic() - told > POSITION_INTERVAL
        if is_due and moves_told != _moves:
            moves_told = _moves
            told = time.monotonic()
            send(Position(**_position))  # type: ignore[arg-type]  # it holds numbers alone
