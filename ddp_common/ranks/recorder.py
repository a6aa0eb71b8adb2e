"""Which collectives a rank has begun and not finished, from torch's flight recorder.

torch records the latest collectives of a process (the last 2,000, unless TORCH_FR_BUFFER_SIZE says
otherwise). A thread of the rank answers the agent's question for them: it can while the rank's
main thread waits in a collective, since torch lets other threads run meanwhile.
"""

import json
import os
import pickle
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from ddp_common.messages import Collective

KEPT = 100  # of the latest collectives: enough to see a pattern that repeats with every step
QUESTION = b"collectives"


def answer_questions(questions: Connection) -> None:
    """From now on a thread sends the latest collectives, as JSON, to whoever asks for them."""
    threading.Thread(target=_answer, args=(questions,), daemon=True).start()


def _answer(questions: Connection) -> None:
    while True:
        try:
            questions.recv_bytes()
            collectives = latest()
            answer = None if collectives is None else [vars(each) for each in collectives]
            questions.send_bytes(json.dumps(answer).encode())
        except (EOFError, OSError):  # nobody can ask any more
            return


def latest() -> list[Collective] | None:
    """This process's latest collectives, oldest first; None if this torch does not record them."""
    # Not at the top: the answering thread starts before torch is there.
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return None
    recorded = pickle.loads(dump(True, True, False))  # collectives, with stacks, finished ones too
    now = time.time()
    return [_collective(entry, now) for entry in recorded.get("entries", [])[-KEPT:]]


def _collective(entry: dict[str, Any], now: float) -> Collective:
    """What torch has recorded of one collective. Entries: torch/distributed/flight_recorder."""
    is_between_two = bool(entry.get("is_p2p"))
    number = entry["p2p_seq_id"] if is_between_two else entry["collective_seq_id"]
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or [""]
    name, description = entry["process_group"]
    return Collective(
        kind=entry["profiling_name"].partition(":")[2],
        number=number,
        group=name if description in ("", "undefined") else description,
        sizes=entry.get("input_sizes") or entry.get("output_sizes") or [],
        dtype=dtypes[0],
        is_between_two=is_between_two,
        is_finished=bool(entry["retired"]),
        seconds_ago=now - entry["time_created_ns"] / 1e9,
        line=_line_of_user(entry.get("frames", [])),
    )


def _line_of_user(frames: list[dict[str, Any]]) -> str:
    """Of a stack, innermost call first: the first line that is of the user's program.

    '' where nothing but torch, this package and what started the rank is in it.
    """
    import torch

    libraries = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    for frame in frames:
        path = frame["filename"]
        if path.startswith(libraries[1]) and frame["name"] == "_call":
            return ""  # of process.py: from here on, what started the rank
        if "/ipykernel_" in path:
            return f"line {frame['line']} of a notebook cell"
        if not path.startswith((*libraries, "<")):
            return f"{os.path.basename(path)}:{frame['line']}"
    return ""
