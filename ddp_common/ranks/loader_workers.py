"""DataLoader workers of a rank that is told to stop: they go on until it has saved and left.

torchrun sends SIGTERM to the whole process group of a rank, and Slurm to all processes of a step.
torch's workers would die of it, and with them the rank, in the middle of the step that it is to
finish. Relies on workers being forked, and on what torch calls in a worker to set its handlers of
signals, which it does not document: where that is missing, they die of it. Promises: a SIGTERM
that the rank has got too does not end a worker, the next one does; one that the rank has not got
ends it, as ever.
"""

import mmap
import os
import signal
import time

SAME_SIGNAL = 1.0  # seconds between a signal's arrival at a rank and at its workers

_rank_was_told: mmap.mmap | None = None  # a byte that this rank shares with what it forks


def outlive_a_sigterm_to_all() -> None:
    """From now on, workers that this process forks stay when it is told to stop itself."""
    global _rank_was_told
    from torch.utils.data._utils import signal_handling  # with torch, which takes a second

    if _rank_was_told is not None:
        _rank_was_told[0] = 0
        return
    set_torchs_handlers = getattr(signal_handling, "_set_worker_signal_handlers", None)
    if set_torchs_handlers is None:  # another version of torch
        return
    _rank_was_told = mmap.mmap(-1, 1)

    def set_handlers() -> None:
        set_torchs_handlers()
        signal.signal(signal.SIGTERM, _on_sigterm_in_worker)

    signal_handling._set_worker_signal_handlers = set_handlers


def note_that_rank_was_told() -> None:
    """Tell the workers: it is called when the rank gets SIGTERM."""
    if _rank_was_told is not None:
        _rank_was_told[0] = 1


def _on_sigterm_in_worker(number, frame):
    assert _rank_was_told is not None, "it was there before this worker"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    deadline = time.monotonic() + SAME_SIGNAL
    while not _rank_was_told[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not _rank_was_told[0]:
        os.kill(os.getpid(), signal.SIGTERM)
