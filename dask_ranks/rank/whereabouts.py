"""Where a rank is, told by a thread of it when its worker asks by a signal.

The answer is one `Whereabouts`: the stack of the main thread, what that waits for, and the latest
collectives from torch's flight recorder. The thread can answer while the main thread waits in a
collective, since torch lets other threads run meanwhile. A rank in a call of C that keeps Python's
lock does not answer. The recorder is not a documented part of torch: where it is not as expected,
the answer has no collectives.
"""

import functools
import itertools
import os
import pickle
import signal
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import dask_ranks
import ddp_common
from dask_ranks.messages import ASK_WHERE, Collective, Whereabouts

# How many collectives torch keeps of a rank, unless TORCH_FR_BUFFER_SIZE is set: enough to see a
# pattern that repeats with every step. Torch's own 2,000 take seconds to be told with their lines.
KEPT = 500
HERE = os.path.dirname(__file__)


def keep_collectives() -> None:
    """Have torch keep `KEPT` collectives of this process; call it before there is a group."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))


def answer_questions(post: Callable[[Whereabouts], None]) -> None:
    """From now on a thread passes a `Whereabouts` to `post` for each `ASK_WHERE`.

    It must be blocked in all threads; it is not in what this process forks, where nobody waits for
    it.
    """
    threading.Thread(target=_answer, args=(post,), daemon=True, name="ddp-whereabouts").start()
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {ASK_WHERE})
    os.register_at_fork(after_in_child=unblock)


def _answer(post: Callable[[Whereabouts], None]) -> None:
    while True:
        signal.sigwait({ASK_WHERE})
        try:
            post(_answer_now())
        except OSError:  # nobody reads the pipe any more
            return


def _answer_now() -> Whereabouts:
    from torch.nn.parallel import distributed as ddp
    from torch.utils.data import dataloader

    collectives = latest_collectives()
    identifier = threading.main_thread().ident
    assert identifier is not None, "it runs"
    innermost = sys._current_frames()[identifier]
    calls = calls_of_libraries(innermost)
    return Whereabouts(
        stack=_stack(innermost),
        collectives=None if collectives is None else [vars(each) for each in collectives],
        in_collective=is_in_collective(calls),
        in_forward=(ddp.__file__, "_pre_forward") in calls,
        waits_for_loader=(dataloader.__file__, "_try_get_data") in calls,
    )


def _stack(innermost: FrameType) -> str:
    """As in a traceback, innermost call first, from the training function on."""
    frames = traceback.extract_stack(innermost)
    calls = [number for number, frame in enumerate(frames) if is_call(frame.filename, frame.name)]
    first = calls[-1] + 1 if calls else 0
    return "".join(reversed(traceback.format_list(frames[first:])))


def calls_of_libraries(innermost: FrameType) -> list[tuple[str, str]]:
    """File and function of what the innermost call of the user's program has called.

    Innermost first. Nothing further out says what a rank does: DDP's forward is around every call
    of a model.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_stack(innermost)]
    calls = [(code.co_filename, code.co_name) for code in codes]
    return list(itertools.takewhile(lambda call: not is_of_program(call[0]), calls))


def is_in_collective(calls: list[tuple[str, str]]) -> bool:
    """Whether a rank is in a call of torch.distributed, or in a backward."""
    import torch.distributed
    from torch.nn.parallel import distributed as ddp

    from ddp_common import exchange

    if calls and calls[0][0] == exchange.__file__:
        return True  # it waits for what it has begun
    folder = torch.distributed.__path__[0] + os.sep
    return any(
        path.startswith(folder)
        or name == "_engine_run_backward"
        or (path == ddp.__file__ and name not in ("forward", "_run_ddp_forward"))
        for path, name in calls
    )


@functools.cache
def is_of_program(path: str) -> bool:
    """Whether a file is of the user's program: not Python's own, not torch's, not ours.

    Packages that the program uses count as it.
    """
    import torch

    for package in (torch, ddp_common, dask_ranks):
        if path.startswith(package.__path__[0] + os.sep):
            return False
    packages = tuple(site.getsitepackages())  # they may lie in the folder of the standard library
    return path.startswith(packages) or not path.startswith((sysconfig.get_path("stdlib"), "<"))


def is_call(path: str, name: str) -> bool:
    """Whether a frame is the one that calls the training function: that of `life._call`."""
    return name == "_call" and path.startswith(HERE)


def latest_collectives() -> list[Collective] | None:
    """This process's latest collectives, oldest first.

    None if none are known.
    """
    now = time.time()
    try:
        from torch.distributed.distributed_c10d import _world

        members: dict[str, list[int]] = {}  # of each process group that this rank is in
        for group, name in _world.pg_names.items():
            members[name] = sorted(_world.pg_group_ranks[group])
        entries = recorded(with_lines=True)[-KEPT:]
        collectives = [_collective(entry, now, members) for entry in entries]
    except Exception:  # whatever another torch's recorder is like, the stack is still an answer
        return None
    return collectives or None


def last_ended() -> int | None:
    """When the latest collective that has ended had begun, in ns; None if none is known."""
    try:
        ended = [each["time_created_ns"] for each in recorded(with_lines=False) if each["retired"]]
    except Exception:  # as in `latest_collectives`
        return None
    return max(ended, default=None)


def has_called_collectives() -> bool:
    """Whether this process has called a collective; also where torch does not say so."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        return True
    try:
        return bool(recorded(with_lines=False))
    except Exception:  # as in `latest_collectives`
        return True


def recorded(with_lines: bool) -> list[dict[str, Any]]:
    """What torch has recorded, oldest first. Lines of the program take most of the time."""
    # Not at the top: the answering thread starts before torch is there.
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):  # NCCL has a recorder of its own
        dump = getattr(c10d, name, None)
        if dump is not None:
            # collectives, their stacks, finished ones too
            entries += pickle.loads(dump(True, with_lines, False)).get("entries", [])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


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


def _line_of_user(frames: list[dict[str, Any]]) -> str:
    """Of a stack, innermost call first: the first line that is of the user's program.

    '' where nothing but libraries and what started the rank is in it.
    """
    for frame in frames:
        path = frame["filename"]
        if is_call(path, frame["name"]):
            return ""  # from here on, what started the rank
        if "/ipykernel_" in path:
            return f"line {frame['line']} of a notebook cell"
        if is_of_program(path):
            return f"{os.path.basename(path)}:{frame['line']}"
    return ""
