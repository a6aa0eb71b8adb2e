"""What ranks have recorded of their steps (`ranks.trace`), on one time axis.

A picture with lanes for each rank, the mean time per step of each lane, and a file of all ranks
that Perfetto (https://ui.perfetto.dev) and chrome://tracing open: the trace event format.
"""

import gzip
import json
import statistics
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_common.errors import Error
from ddp_common.messages import ATTEMPT, HOST, LEAD, RECORDINGS, STEPS
from ddp_common.run.places import shown
from ddp_common.run.result import as_picture

FILE = f"{RECORDINGS}/all-ranks.json.gz"
PICTURE = "timeline.png"

# Colours that the colour-blind can tell apart: Okabe and Ito, https://jfly.uni-koeln.de/color/
LANES = {
    "data": "#999999",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "communication": "#d55e00",
    "waiting": "#f0e442",
    "optimizer": "#009e73",
}
LOADING = "enumerate(DataLoader)"
FORWARD = "DistributedDataParallel.forward"
BACKWARD = "autograd::engine::evaluate_function"
OPTIMIZER = "Optimizer.step"
BACKENDS = ("gloo:", "nccl:")

Span = tuple[float, float]  # from, until: microseconds


@dataclass
class Recorded:
    """What one rank has recorded; times are microseconds since 1970 by the clock of its host."""

    rank: int
    host: str
    attempt: tuple  # which of the starts of all ranks, where a run has several
    events: list[dict[str, Any]]  # of the trace event format, those that have a duration
    lanes: dict[str, list[Span]]
    ends: list[float]  # of the steps


@dataclass
class Timeline:
    """`figure` (matplotlib), `frame` (pandas: ms per step, a row for each rank), `picture` and
    `file`: the paths of both in the run directory, the second for Perfetto."""

    figure: Any
    frame: Any
    picture: Path
    file: Path

    def _repr_png_(self) -> bytes:
        return as_picture(self.figure, "png")


def timeline(directory: Path, save: Callable[[str, bytes], None]) -> Timeline:
    """Draw what the ranks of a run have recorded, and join it into one file.

    `save(name, content)` writes a file in the run directory. Raises `Error` if nothing was
    recorded, or if what lies there cannot be read.
    """
    import pandas  # these three take a second, which only this function needs

    ranks = _aligned(_read(directory))
    rows = {each.rank: _per_step(each) for each in ranks}
    frame = pandas.DataFrame.from_dict(rows, orient="index", columns=list(LANES))
    frame.index.name = "rank"
    figure = _draw(ranks, frame)
    save(PICTURE, as_picture(figure, "png"))
    joined = {"traceEvents": _for_perfetto(ranks), "displayTimeUnit": "ms"}
    save(FILE, gzip.compress(json.dumps(joined).encode(), compresslevel=3))
    return Timeline(figure, frame, directory / PICTURE, directory / FILE)


# Reading


def _read(directory: Path) -> list[Recorded]:
    """The recordings of one attempt: that of the newest file."""
    files = list((directory / RECORDINGS).glob("rank-*.json.gz"))
    if not files:
        raise Error(
            f"No steps were recorded in {shown(directory)}. Call ddp.trace(steps=5) in the "
            "training function, or start with make run … TRACE=5 (DDP_TRACE=5)."
        )
    newest = max(files, key=lambda path: path.stat().st_mtime)
    of_newest = _read_file(newest)
    others = [_read_file(path) for path in files if path != newest]
    alike = [each for each in others if each.attempt == of_newest.attempt]
    return sorted([of_newest, *alike], key=lambda each: each.rank)


# What reading a damaged recording raises
DAMAGED = (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError)


def _read_file(path: Path) -> Recorded:
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        base = content.get("baseTimeNanoseconds", 0) / 1000
        about = content.get("distributedInfo", {})
        events = [
            {**event, "ts": event["ts"] + base}
            for event in content["traceEvents"]
            if event.get("ph") == "X" and event.get("cat") != "Trace" and event.get("dur", 0) >= 0
        ]
    except DAMAGED as error:
        raise Error(f"{shown(path)} is no recording of steps that can be read: {error}.") from None
    lead, steps = int(content.get(LEAD, 0)), int(content.get(STEPS, 0))
    ends = [end for _, end in _spans(events, OPTIMIZER)][: lead + steps]
    if len(ends) <= lead:
        raise Error(f"{shown(path)} has no whole step. Record again, with more steps.")
    since = ends[lead - 1] if lead else float("-inf")
    events = [event for event in events if since <= event["ts"] < ends[-1]]
    ends = ends[lead:]
    return Recorded(
        rank=int(path.name.removeprefix("rank-").partition(".")[0]),
        host=content.get(HOST, ""),
        attempt=(content.get(ATTEMPT), about.get("world_size", 1)),
        events=events,
        lanes=_lanes(events),
        ends=ends,
    )


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event.get("dur", 0)


def _spans(events: list[dict[str, Any]], *beginnings: str) -> list[Span]:
    """When events whose names begin so took place: in order, overlapping ones joined."""
    found = sorted(
        (event["ts"], _end(event)) for event in events if event["name"].startswith(beginnings)
    )
    return _joined(found)


def _joined(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in spans:
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _lanes(events: list[dict[str, Any]]) -> dict[str, list[Span]]:
    """What the rank did when.

    A backward lasts from its first operation to its last; waiting is what communication still
    takes between that and the optimizer.
    """
    optimizer = _spans(events, OPTIMIZER)
    forward = _spans(events, FORWARD)
    communication = _spans(events, *BACKENDS)
    operations = _spans(events, BACKWARD)
    forwards = [begin for begin, _ in forward]
    backward: list[Span] = []
    waiting: list[Span] = []
    previous = float("-inf")
    for begin, _ in optimizer:
        within = [span for span in operations if previous < span[0] < begin]
        for piece in _cut_at(forwards, within):  # several where gradients are accumulated
            backward.append((piece[0][0], piece[-1][1]))
        if within:
            ends = [min(end, begin) for start, end in communication if previous < start < begin]
            last = max(ends, default=previous)
            if last > within[-1][1]:
                waiting.append((within[-1][1], last))
        previous = begin
    return {
        "data": _spans(events, LOADING),
        "forward": forward,
        "backward": backward,
        "communication": communication,
        "waiting": waiting,
        "optimizer": optimizer,
    }


def _cut_at(times: list[float], spans: list[Span]) -> list[list[Span]]:
    """Spans in pieces, none of which has one of the times between two of its spans."""
    pieces: list[list[Span]] = []
    for span in spans:
        before = pieces[-1][-1][0] if pieces else float("-inf")
        if pieces and not any(before < time < span[0] for time in times):
            pieces[-1].append(span)
        else:
            pieces.append([span])
    return pieces


def _last_ends(recorded: Recorded) -> list[float]:
    """When the last communication of each step ended; at its optimizer's begin at the latest."""
    ends = []
    for begin, _ in recorded.lanes["optimizer"]:
        before = [min(_end(event), begin) for event in recorded.events if _is_before(event, begin)]
        ends.append(max(before, default=begin))
    return ends


def _is_before(event: dict[str, Any], moment: float) -> bool:
    return event["name"].startswith(BACKENDS) and event["ts"] < moment


def _aligned(ranks: list[Recorded]) -> list[Recorded]:
    """The same, all by the clock of the first one's host.

    Ranks finish the last all_reduce of a step at about the same time: where hosts differ, the
    median difference of these ends is what their clocks differ by.
    """
    first = ranks[0]
    for other in ranks[1:]:
        if other.host == first.host:
            continue
        pairs = zip(_last_ends(first), _last_ends(other))
        differences = [one - another for one, another in pairs]
        if differences:
            _shift(other, statistics.median(differences))
    return ranks


def _shift(recorded: Recorded, by: float) -> None:
    for event in recorded.events:
        event["ts"] += by
    recorded.lanes = {
        name: [(begin + by, end + by) for begin, end in spans]
        for name, spans in recorded.lanes.items()
    }
    recorded.ends = [end + by for end in recorded.ends]


def _per_step(recorded: Recorded) -> list[float]:
    """Milliseconds of each lane in a step, the mean of all that were recorded."""
    steps = len(recorded.ends)
    return [
        sum(end - begin for begin, end in recorded.lanes[name]) / 1000 / steps for name in LANES
    ]


# Drawing and joining


def _beginning(ranks: list[Recorded]) -> float:
    return min(event["ts"] for each in ranks for event in each.events)


def _draw(ranks: list[Recorded], frame: Any) -> Any:
    from matplotlib.figure import Figure  # not pyplot: the caller's figures are left alone

    names = list(LANES)
    figure = Figure(figsize=(11, 0.9 + 0.34 * len(names) * len(ranks)))
    axes = figure.add_subplot()
    zero = _beginning(ranks)
    places, labels = [], []
    for number, each in enumerate(ranks):
        for lane, name in enumerate(names):
            place = -(number * (len(names) + 0.7) + lane)
            bars = [
                ((begin - zero) / 1000, (end - begin) / 1000) for begin, end in each.lanes[name]
            ]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=LANES[name])
            places.append(place)
            mean = frame.loc[each.rank, name]
            labels.append(f"rank {each.rank}  {name}  {mean:.1f} ms a step")
        for end in each.ends:
            bottom = -(number * (len(names) + 0.7) + len(names) - 0.5)
            axes.plot([(end - zero) / 1000] * 2, [bottom, bottom + len(names)], "k:", linewidth=1)
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_xlabel("ms since the recording began; a dotted line ends a step")
    steps = max(len(each.ends) for each in ranks)
    axes.set_title(f"{steps} steps of {len(ranks)} rank(s)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _for_perfetto(ranks: list[Recorded]) -> list[dict[str, Any]]:
    """All events, each rank as a process of its own, from time 0 on."""
    zero = _beginning(ranks)
    joined: list[dict[str, Any]] = []
    for each in ranks:
        name = f"rank {each.rank} on {each.host}"
        joined.append(_name("process_name", each.rank, 0, name))
        for event in each.events:
            joined.append({**event, "pid": each.rank, "ts": event["ts"] - zero})
    return joined


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
