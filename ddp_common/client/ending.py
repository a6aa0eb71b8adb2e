"""End an attempt, however it went: afterwards its ranks are gone, and its checkpoints are here.

It raises nothing but what a user does: how the attempt ended is known already.
"""

import time

from distributed import CancelledError

from ddp_common.client.attempt import SHORT_LOOK, Attempt
from ddp_common.client.rank import Phase
from ddp_common.errors import Error

GONE_TIMEOUT = 7  # seconds to wait for ranks to be gone: an agent takes longer if one stays
UNSTARTED_TIMEOUT = 1  # the same for ranks that have not started, which may say nothing


def end(attempt: Attempt) -> None:
    """Cancel what still runs, wait until every rank is gone, and fetch the last checkpoints."""
    # Asked before we cancel tasks ourselves, which looks like a loss.
    connected = not attempt.state.is_cancelled and attempt.client.status == "running"
    try:
        if connected:
            _end_ranks(attempt)
            _finish_fetching(attempt)
    except (OSError, CancelledError, Error) as error:
        attempt.directory.problem(f"After the run had ended: {error}", "end")
    finally:
        # Let go of all tasks, and so of their results: one that hands over tables may still wait
        # for a worker that is gone.
        for task in attempt.tasks():
            task.release()
        attempt.recorder.close()


def _end_ranks(attempt: Attempt) -> None:
    """Cancel what still runs and wait until every rank says that it is gone."""
    running = [rank.task for rank in attempt.ranks if rank.task and not rank.task.done()]
    if running:
        attempt.client.cancel(running, force=True)
    began = time.monotonic()
    while time.monotonic() < began + GONE_TIMEOUT:
        pending = [rank for rank in attempt.ranks if rank.task and rank.end is None]
        if not pending:
            return
        none_has_started = not any(rank.has_started for rank in pending)
        if none_has_started and time.monotonic() > began + UNSTARTED_TIMEOUT:
            return
        attempt.take_next(SHORT_LOOK)


def _finish_fetching(attempt: Attempt) -> None:
    """Get the last checkpoints of workers that do not see the run directory."""
    lost = {rank.address for rank in attempt.ranks if rank.phase is Phase.LOST}
    problem = attempt.checkpoints.close(lost)
    if problem:
        attempt.directory.problem(
            f"The newest checkpoint could not be fetched: {problem}", "fetch"
        )
