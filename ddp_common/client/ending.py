"""End an attempt, however it went: afterwards its ranks are gone, and its checkpoints are here.

It raises nothing but what a user does: how the attempt ended is known already.
"""

import time

from distributed import CancelledError

from ddp_common.client.attempt import SHORT_LOOK, Attempt
from ddp_common.errors import Error

GONE_TIMEOUT = 7  # seconds to wait for ranks to be gone: more than an agent takes at most
UNSTARTED_TIMEOUT = 1  # the same for ranks that never started, which say nothing


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
        for future in filter(None, [*attempt.futures, *attempt.handed]):
            future.release()
        attempt.recorder.close()


def _end_ranks(attempt: Attempt) -> None:
    """Cancel what still runs and wait until every rank says that it is gone."""
    running = [future for future in attempt.futures if not future.done()]
    if running:
        attempt.client.cancel(running, force=True)
    began = time.monotonic()
    while time.monotonic() < began + GONE_TIMEOUT:
        pending = set(range(len(attempt.futures))) - set(attempt.state.ended)
        if not pending:
            return
        none_has_started = not pending & set(attempt.state.hosts)
        if none_has_started and time.monotonic() > began + UNSTARTED_TIMEOUT:
            return
        attempt.take_next(SHORT_LOOK)


def _finish_fetching(attempt: Attempt) -> None:
    """Get the last checkpoints of workers that do not see the run directory."""
    state = attempt.state
    lost = {rank for rank, end in state.ended.items() if end.how == "lost"} | state.lost_late
    problem = attempt.checkpoints.close({attempt.addresses[rank] for rank in lost})
    if problem:
        attempt.directory.problem(
            f"The newest checkpoint could not be fetched: {problem}", "fetch"
        )
