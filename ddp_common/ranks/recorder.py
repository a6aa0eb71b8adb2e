"""Which collectives a rank has begun and not finished, from torch's flight recorder.

torch records the latest collectives of a process. A thread of the rank answers the agent's
question for them: it can while the rank's main thread waits in a collective, since torch lets
other threads run meanwhile. The recorder is not a documented part of torch: where it is not as
expected, the answer is that nothing is known.
"""

import json
import os
import pickle
import sysconfig
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from ddp_common.messages import Collective

# How many collectives torch keeps of a rank, unless TORCH_FR_BUFFER_SIZE is set: enough to see a
# pattern that repeats with every step. Torch's own 2,000 take seconds to be told with their lines.
KEPT = 500
FROM_LAUNCHER = f"{os.sep}ranks{os.sep}rendezvous.py"  # its collectives are none of the user's
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def keep_the_latest() -> None:
    """Have torch keep `KEPT` collectives of this process; call it before there is a group."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))


def answer_questions(questions: Connection) -> None:
    """From now on a thread answers each question, which is a number on a line.

    The answer is a line of JSON: the same number, and the latest collectives or null.
    """
    threading.Thread(target=_answer, args=(questions,), daemon=True).start()


def _answer(questions: Connection) -> None:
    with open(questions.fileno(), "rb", closefd=False) as asked:
        for number in asked:  # until nobody can ask any more
            answer = json.dumps([int(number), known()]).encode() + b"\n"
            try:
                while answer:
                    answer = answer[os.write(questions.fileno(), answer) :]
            except OSError:  # nobody listens any more
                return


def known() -> list[dict[str, Any]] | None:
    """The fields of this process's latest collectives, oldest first; None if none are known."""
    try:
        collectives = latest()
    except Exception:  # whatever another torch's recorder is like, training goes on
        return None
    return [vars(each) for each in collectives] if collectives else None


def latest() -> list[Collective]:
    """This process's latest collectives, oldest first; without those of the launcher itself."""
    now = time.time()
    members = _members()
    return [
        _collective(entry, now, members)
        for entry in _entries()[-KEPT:]
        if not _is_launchers(entry)
    ]


def _entries() -> list[dict[str, Any]]:
    """What torch has recorded, oldest first."""
    # Not at the top: the answering thread starts before torch is there.
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):  # NCCL has a recorder of its own
        dump = getattr(c10d, name, None)
        if dump is not None:
            # collectives, their stacks, finished ones too
            entries += pickle.loads(dump(True, True, False)).get("entries", [])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def _members() -> dict[str, list[int]]:
    """The ranks of each process group that this rank is in, by torch's name for it."""
    from torch.distributed.distributed_c10d import _world

    return {name: sorted(_world.pg_group_ranks[group]) for group, name in _world.pg_names.items()}


def _collective(entry: dict[str, Any], now: float, members: dict[str, list[int]]) -> Collective:
    """What torch has recorded of one collective. Entries: torch/distributed/flight_recorder."""
    is_between_two = bool(entry.get("is_p2p"))
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or [""]
    name, description = entry["process_group"]
    return Collective(
        kind=entry["profiling_name"].partition(":")[2],
        number=entry["p2p_seq_id"] if is_between_two else entry["collective_seq_id"],
        group=name,
        description=name if description in ("", "undefined") else description,
        members=members.get(name, []),
        sizes=entry.get("input_sizes") or entry.get("output_sizes") or [],
        dtype=dtypes[0],
        is_between_two=is_between_two,
        is_finished=bool(entry["retired"]) or entry.get("state") == "completed",
        seconds_ago=now - entry["time_created_ns"] / 1e9,
        line=_line_of_user(entry.get("frames", [])),
    )


def _is_launchers(entry: dict[str, Any]) -> bool:
    paths = (frame["filename"] for frame in entry.get("frames", []))
    outside_torch = (path for path in paths if f"{os.sep}torch{os.sep}" not in path)
    return next(outside_torch, "").endswith(FROM_LAUNCHER)


def _line_of_user(frames: list[dict[str, Any]]) -> str:
    """Of a stack, innermost call first: the first line that is of the user's program.

    '' where nothing but libraries and what started the rank is in it.
    """
    import torch

    ours = os.path.dirname(__file__)
    libraries = (os.path.dirname(torch.__file__), ours, STANDARD_LIBRARY, "<")
    for frame in frames:
        path = frame["filename"]
        if path.startswith(ours) and frame["name"] == "_call":
            return ""  # of process.py: from here on, what started the rank
        if "/ipykernel_" in path:
            return f"line {frame['line']} of a notebook cell"
        if not path.startswith(libraries):
            return f"{os.path.basename(path)}:{frame['line']}"
    return ""
