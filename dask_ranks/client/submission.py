"""Start the ranks of an attempt: from claimed workers to a submitted task for each rank.

Settles where checkpoints are, hands over tables, and has rank 0's worker open the socket at which
the ranks meet.
"""

import functools
import math
import time
from typing import Any

from distributed import wait
from distributed.comm import get_address_host

from dask_ranks.client.attempt import Attempt
from dask_ranks.client.tables import Tables
from dask_ranks.messages import RankSpec
from dask_ranks.worker import agent

ANSWER_TIMEOUT = 5  # seconds that a worker has to answer, or the launch's `timeout` if longer
COPY_TIMEOUT = 600  # seconds that a checkpoint may take to all workers that do not see it
LARGE = 2**20  # bytes of function and arguments


def start(attempt: Attempt, payload: Any, tables: Tables) -> None:
    """Start all ranks; `payload` is the pickled training function with its arguments.

    Raises `RankFailed` if a worker is lost meanwhile, and `Error` for one that does not answer.
    """
    timeout = max(attempt.job.timeout, ANSWER_TIMEOUT)
    attempt.wait_for(attempt.checkpoints.find, timeout)
    attempt.wait_for(attempt.checkpoints.hand_out, COPY_TIMEOUT)
    if tables.given:
        handed = tables.hand_over(attempt.addresses, attempt.attempt_id)
        for rank, task in zip(attempt.ranks, handed):
            rank.tables = task
        attempt.wait_for(lambda: wait(handed), math.inf)
        tables.handed_over(handed)
    first = attempt.addresses[:1]
    answers = attempt.wait_for(
        lambda: attempt.client.run(agent.listen, attempt.attempt_id, workers=first), timeout
    )
    if len(payload) > LARGE:
        # Through the scheduler once, to one worker, from which the others take it
        scatter = functools.partial(attempt.client.scatter, payload, workers=first, hash=False)
        payload = attempt.wait_for(scatter, COPY_TIMEOUT)
    for spec in _specs(attempt, answers[first[0]]):
        _submit(attempt, spec, payload)
    attempt.submitted = time.monotonic()


def _specs(attempt: Attempt, store: tuple[str, int]) -> list[RankSpec]:
    hosts = [get_address_host(address) for address in attempt.addresses]
    groups = list(dict.fromkeys(hosts))
    return [
        RankSpec(
            attempt=attempt.attempt_id,
            rank=rank,
            world_size=len(hosts),
            local_rank=hosts[:rank].count(host),
            local_world_size=hosts.count(host),
            group_rank=groups.index(host),
            group_world_size=len(groups),
            run_id=attempt.directory.path.name,
            restart_count=attempt.number - 1,
            max_restarts=attempt.job.restarts,
            store=store,
            checkpoints=attempt.checkpoints.folders[address],
        )
        for rank, (address, host) in enumerate(zip(attempt.addresses, hosts))
    ]


def _submit(attempt: Attempt, spec: RankSpec, payload: Any) -> None:
    """Submit a task that only this rank's worker may run."""
    rank = attempt.ranks[spec.rank]
    rank.task = attempt.client.submit(
        agent.run_rank,
        spec,
        payload,
        rank.tables,
        workers=[rank.address],
        pure=False,
        retries=0,
        key=f"ddp-rank-{attempt.attempt_id}-{spec.rank}",
        priority=10,
    )
    rank.task.add_done_callback(functools.partial(attempt.note_end, spec.rank))
