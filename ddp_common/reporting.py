"""Metrics and files from any rank to the client: any time, no collective, no waiting.

A rank puts what it reports into a queue; one thread turns tensors into numbers and hands messages to the agent, which passes them on
to the client. There they become `metrics.jsonl` and files of the run directory, and the progress that is drawn. Without an agent
(a single process, torchrun) nobody listens, and reports are dropped after the same checks.
"""

import decimal
import itertools
import json
import math
import numbers
import os
import queue
import re
import sys
import threading
import time
from pathlib import Path

import numpy
from tqdm import tqdm

from ddp_common.errors import Error

POSITION_INTERVAL = 0.1  # seconds between two messages that only say where training is

_outbox = None  # queue of this rank's messages; None when no agent listens
_position = {}  # epoch, step, samples…: kept up to date by the sampler
_last_sent = 0.0


def report(**values):
    """Send scalars to the client: numbers, or tensors with one element. Also sends epoch and step, if a sampler counts them.

    Raises `Error` at once for anything that is not a scalar. A tensor on a GPU is read by another thread: training does not wait.
    """
    record = {name: _scalar(name, value) for name, value in values.items()}
    if _outbox is not None:
        place = {key: _position[key] for key in ("epoch", "step", "samples") if key in _position}
        _outbox.put({"report": {"time": time.time(), **place, **record}})


def save_file(name, content):
    """Send a small file to the run directory under the relative path `name`. `content` is bytes or str.

    Raises `Error` for a name that would leave the run directory.
    """
    check_name(name)
    if _outbox is not None:
        _outbox.put({"file": name, "content": content.encode() if isinstance(content, str) else bytes(content)})


def check_name(name):
    """Raise `Error` unless `name` is a relative path of plain names, on whatever system the client runs."""
    parts = re.split(r"[/\\]", name)
    if not name or ":" in parts[0] or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise Error(f"The file name {name!r} would leave the run directory. Use a relative name such as 'samples/epoch-1.txt'.")


def set_position(**position):
    """The sampler's word on where training is; the client's progress bar lives on it."""
    global _last_sent
    _position.clear()
    _position.update((key, value) for key, value in position.items() if value is not None)
    now = time.monotonic()
    if _outbox is not None and now - _last_sent > POSITION_INTERVAL:
        _last_sent = now
        _outbox.put({"position": dict(_position)})


def _scalar(name, value):
    value = value.item() if isinstance(value, numpy.generic) else value
    if isinstance(value, (numbers.Real, decimal.Decimal)):
        return value if isinstance(value, int) and abs(value) < 2**63 else float(value)  # msgpack knows no larger int
    if hasattr(value, "detach") and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()) if value.is_cuda else value.item()
    what = f"a tensor of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)[:80]
    raise Error(f"report({name}=…) takes a number or a tensor with one element, not {what}. Report a mean or a sum instead; "
                "for anything larger use save_file.")


def start(send):
    """Give this rank an outbox whose messages go to `send(message)`; returns a function that sends the rest and ends the thread."""
    global _outbox
    outbox = _outbox = queue.SimpleQueue()

    def deliver():
        while (message := outbox.get()) is not None:
            if "report" in message:
                message["report"] = {key: value.item() if hasattr(value, "item") else value for key, value in message["report"].items()}
            send(message)

    thread = threading.Thread(target=deliver, daemon=True, name="ddp-reports")
    thread.start()

    def finish():
        outbox.put({"position": dict(_position)} if _position else {})
        outbox.put(None)
        thread.join()

    return finish


class RunDirectory:
    """The client's side: `runs/<tutorial>/<time>/` with config.json, metrics.jsonl, log.txt, checkpoints/ and whatever ranks save."""

    def __init__(self, path):
        self.path = Path(path)
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.records = self._earlier_records()
        self._metrics = open(self.path / "metrics.jsonl", "a", buffering=1)
        self._log = open(self.path / "log.txt", "a", buffering=1)

    def _earlier_records(self):
        """Those of a run that is resumed. What ends in a half-written line is written again without it."""
        lines, records = (self.path / "metrics.jsonl").read_text().splitlines() if (self.path / "metrics.jsonl").exists() else [], []
        try:
            for line in lines:
                records.append({key: float(value) if isinstance(value, str) else value for key, value in json.loads(line).items()})
        except ValueError:
            self.save("metrics.jsonl", "".join(line + "\n" for line in lines[:len(records)]).encode())
        return records

    def record(self, rank, values):
        self.records.append({"rank": rank, **values})
        finite = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}
        self._metrics.write(json.dumps({"rank": rank, **finite}) + "\n")  # JSON has no NaN: it is written as its name

    def log(self, text):
        self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def write_json(self, name, values):
        self.save(name, (json.dumps(values, indent=2, default=str) + "\n").encode())

    def save(self, name, content):
        """Write bytes to the relative path `name`, whole or not at all. Raises `Error` if a link leads it out of the directory."""
        check_name(name)
        path = self.path / name
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise Error(f"The file name {name!r} leads out of the run directory through a link ({path.resolve()}). Choose another name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(content)
        temporary.replace(path)

    def close(self):
        self._metrics.close()
        self._log.close()


def new_directory(name):
    """A path that no other run has, under RUNS (default: `runs/` of the repository, or of the working directory)."""
    repository = Path(__file__).parent.parent
    root = Path(os.environ.get("RUNS") or (repository if (repository / "tutorials").is_dir() else Path.cwd()) / "runs")
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))):
        path = root / name / f"{stamp}{suffix}"
        try:
            path.mkdir(parents=True)  # the one who makes it owns it, also when two launches share a second
        except FileExistsError:
            continue
        except OSError as error:
            raise Error(f"Cannot make the run directory {path}: {error.strerror}. Choose another place with RUNS=…") from None
        return path


class Progress:
    """Draws where training is: a bar on a terminal, a line per epoch where DDP_PROGRESS=lines says so, else nothing.

    A notebook that is executed to be kept must print the same every time, so it draws nothing unless DDP_PROGRESS=bar (`make lab`).
    """

    def __init__(self):
        self.mode = os.environ.get("DDP_PROGRESS") or ("bar" if sys.stderr.isatty() else "off")
        self.bar, self.losses, self.epoch, self.mark, self.place = None, [], None, None, {}

    def position(self, place):
        """`place`: epoch, step, samples, epochs, total_samples, as the sampler counts them; the fastest rank leads."""
        if self.mode == "off" or "total_samples" not in place or place["samples"] < self.place.get("samples", 0):
            return
        if self.mode == "bar":
            if self.bar is None:
                self.bar = tqdm(total=place["total_samples"], initial=place["samples"], unit=" samples", unit_scale=True,
                                dynamic_ncols=True, mininterval=0.1)
            self.bar.set_description(f"epoch {place['epoch'] + 1}/{place['epochs']}", refresh=False)
            self.bar.update(place["samples"] - self.bar.n)
        elif place["epoch"] != self.epoch:
            self._epoch_line()
            self.epoch, self.mark = place["epoch"], (time.monotonic(), place["samples"])
        self.place = place

    def record(self, values):
        if "loss" not in values:
            return
        self.losses.append(values["loss"])
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {sum(self.losses[-50:]) / len(self.losses[-50:]):.4f}", refresh=False)

    def _epoch_line(self):
        if self.epoch is not None and self.losses:
            started, samples = self.mark
            rate = (self.place["samples"] - samples) / max(time.monotonic() - started, 1e-9)
            loss = sum(self.losses) / len(self.losses)
            print(f"epoch {self.epoch + 1}/{self.place['epochs']}  loss {loss:.4f}  {rate:,.0f} samples/s", flush=True)
        self.losses = []

    def close(self):
        if self.mode == "lines":
            self._epoch_line()
        if self.bar is not None:
            self.bar.close()
