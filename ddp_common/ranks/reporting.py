"""A rank's word to the client: metrics, files and where training is; any time, no collective, no waiting.

What a rank reports goes into a queue. One thread turns tensors into numbers and hands the messages to the agent, which passes them on
to the client (see `run_directory`). Ten times a second it also says where training is, if it has moved: that is how the client knows
that a rank is alive. Without an agent (a single process, torchrun) nobody listens, and reports are dropped after the same checks.
"""

import collections
import decimal
import numbers
import queue
import threading
import time

import numpy

from ddp_common.errors import Error
from ddp_common.files import check_name

SUMMED = ("step", "samples", "total_samples")  # over all samplers of this rank
POSITION_INTERVAL = 0.1  # seconds between two words on where training is
OWN_COLUMNS = ("rank", "time", "event")  # of every record, written by us
LARGEST_INTEGER = 2**63  # from which on msgpack knows none

_outbox = None  # queue of this rank's messages; None when no agent listens
_position = {}  # epoch, step, samples…: kept up to date by the samplers
_positions = {}  # the same of each sampler, by its name
_sums = collections.Counter()  # of their numbers, and how many of them know no total
_moves = 0  # counts everything that is progress


def report(**values):
    """Send scalars to the client: numbers, or tensors with one element. Also sends epoch and step, if a sampler counts them.

    Raises `Error` at once for anything that is not a scalar. A tensor on a GPU is read by another thread: training does not wait.
    """
    record = {name: _scalar(name, value) for name, value in values.items()}
    place = {key: _position[key] for key in ("epoch", "step", "samples") if key in _position}
    post({"report": {"time": time.time(), **place, **record}})


def save_file(name, content):
    """Send a small file to the run directory under the relative path `name`. `content` is bytes or str.

    Raises `Error` for a name that would leave the run directory.
    """
    check_name(name)
    post(
        {"file": name, "content": content.encode() if isinstance(content, str) else bytes(content)}
    )


def post(message):
    """Queue a message (dict) for the client, if there is one."""
    if _outbox is not None:
        _outbox.put(message)


def set_position(whose=None, **place):
    """A sampler's word on where its training is; the client's progress bar lives on it.

    Where several samplers train in turns, steps and samples are those of all of them together: they only ever grow.
    """
    global _position
    before = _positions.get(whose)
    _positions[whose] = place
    for name in SUMMED:
        _sums[name] += (place.get(name) or 0) - (before.get(name) or 0 if before else 0)
    _sums["without_total"] += _has_no_total(place) - (before is not None and _has_no_total(before))
    together = (
        place if len(_positions) == 1 else {**place, **{name: _sums[name] for name in SUMMED}}
    )
    if _sums["without_total"]:
        together = {**together, "total_samples": None, "epochs": None}
    _position = {key: value for key, value in together.items() if value is not None}
    made_progress()


def _has_no_total(place):
    return place.get("total_samples") is None


def steps_of_others(whose):
    """The steps that all samplers but this one have done."""
    return _sums["step"] - _positions.get(whose, {}).get("step", 0)


def position():
    """Where training is (dict): epoch, step, samples, epochs, total_samples, as far as a sampler counts them."""
    return dict(_position)


def made_progress(*_):
    """Say that this rank gets on: called for every step of a sampler or an optimizer, every batch of an evaluation, every save."""
    global _moves
    _moves += 1


def _scalar(name, value):
    """`value` as a plain number, or a tensor of a GPU with one element. Raises `Error` for anything else."""
    if name in OWN_COLUMNS:
        raise Error(
            f"report({name}=…): every record has a column {name!r} already. Choose another name."
        )
    value = value.item() if isinstance(value, numpy.generic) else value
    if isinstance(value, (bool, int)) and abs(value) < LARGEST_INTEGER:
        return value
    if isinstance(value, (numbers.Real, decimal.Decimal)):
        try:
            return float(value)
        except (ValueError, OverflowError) as error:
            raise Error(
                f"report({name}=…): this {type(value).__name__} does not fit into a float ({error})."
            ) from None
    if _has_one_real_element(value):
        return value.detach().reshape(()) if value.is_cuda else value.item()
    what = (
        f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)[:80]
    )
    raise Error(
        f"report({name}=…) takes a number or a tensor with one element, not {what}. Report a mean or a sum instead; "
        "for anything larger use save_file."
    )


def _has_one_real_element(value):
    is_tensor = hasattr(value, "detach") and hasattr(value, "is_meta")
    return is_tensor and value.numel() == 1 and not value.is_complex() and not value.is_meta


def start(send):
    """Give this rank an outbox whose messages go to `send(message)`; returns a function that sends the rest and ends the thread."""
    global _outbox, _position
    outbox = _outbox = queue.SimpleQueue()
    _positions.clear()  # of an earlier launch in this process
    _sums.clear()
    _position = {}
    thread = threading.Thread(
        target=_deliver, args=(outbox, send), daemon=True, name="ddp-reports"
    )
    thread.start()

    def finish():
        outbox.put(None)
        thread.join()

    return finish


def stop():
    """Nobody listens any more."""
    global _outbox
    _outbox = None


def _deliver(outbox, send):
    message, moves, told = {}, _moves, 0.0
    while message is not None:
        try:
            message = outbox.get(timeout=POSITION_INTERVAL)
        except queue.Empty:
            message = {}
        if message:
            if "report" in message:
                message["report"] = {
                    key: value.item() if hasattr(value, "item") else value
                    for key, value in message["report"].items()
                }
            send(message)
        if moves != _moves and (message is None or time.monotonic() - told > POSITION_INTERVAL):
            moves, told = _moves, time.monotonic()
            send({"position": _position})
