"""Waiting for workers, with the queue's own word on why they do not come.

Relies on the client's `Jobs` where workers are jobs. Promises: the wait ends, at the client's
timeout at the latest; a job that ends before its worker came is an error at once, with the end of
its log; one whose worker has been there is submitted again.
"""

import sys
import time

from ddp_common.clusters import queues
from ddp_common.errors import Error

# Seconds between two questions to the queue: a tenth of the wait so far, within these.
SHORTEST_INTERVAL = 1.0
LONGEST_INTERVAL = 10.0


def wait_for_workers(client, count: int, at_least: int | None = None) -> None:
    """Wait until `count` workers are there; once the time is over, `at_least` so many will do.

    `client` is a `ClusterClient`. Says what the queue says whenever it changes. Raises `Error` if
    the workers do not come in time, or if a job has ended before its worker came.
    """
    began = time.monotonic()
    looked = 0.0
    said = None
    while True:
        there = len(client.workers())
        if there >= count:
            break
        now = time.monotonic()
        if client.jobs is not None and now - looked > _interval(now - began):
            states = _look_at_jobs(client)
            looked = now
            line = f"Waiting for workers: {there} of {count}. Jobs: {queues.summary(states)}"
            if line != said:
                print(line, file=sys.stderr, flush=True)
            said = line
        if now - began > client.timeout:
            if at_least and there >= at_least:
                print(
                    f"Going on with {there} of {count} workers: "
                    f"the others did not come within {client.timeout:g} s.",
                    file=sys.stderr,
                )
                return
            raise Error(_too_late(client, there, count))
        time.sleep(0.05)
    if client.jobs is not None:
        client.jobs.note_arrivals(client.workers())


def _interval(waited):
    return min(LONGEST_INTERVAL, max(SHORTEST_INTERVAL, waited / 10))


def _look_at_jobs(client):
    """The jobs' states. Those that have ended are submitted again if their workers had come."""
    client.jobs.note_arrivals(client.workers())
    states = client.jobs.states() or {}
    over = ended(states)
    for job, reason in over.items():
        if job not in client.jobs.arrived:
            raise Error(
                f"Job {client.cluster.workers[job].job_id} ended before its worker came "
                f"({reason}).\n{client.jobs.log(job)}\n"
                "Fix the cause that it names; DRY=1 prints the job script, "
                "`make doctor` checks the usual causes."
            )
    if over:
        client.replace(over)
        client.jobs.submit(client.expected)
    return states


def ended(states: dict[str, tuple[str, str]] | None) -> dict[str, str]:
    """Of the jobs in `states` those that are over: name -> why.

    None means that the queue does not answer; then no job is known to be over.
    """
    if states is None:
        return {}
    return {job: reason for job, (kind, reason) in states.items() if kind == queues.ENDED}


def _too_late(client, there, count):
    message = f"{there} of {count} workers came within {client.timeout:g} s."
    if client.jobs is None:
        return f"{message} {_advice_without_jobs(client, there)}"
    states = client.jobs.states()
    queue = queues.summary(states) if states is not None else "nothing, it does not answer"
    message += f" {client.jobs.system.name} says of the jobs: {queue}. They were cancelled.\n"
    for job, (kind, _) in (states or {}).items():
        if kind == queues.RUNNING and job not in client.jobs.arrived:
            message += f"{client.jobs.log(job)}\n"
    return message + (
        f'Wait longer (OPTIONS="timeout=3600"), ask for fewer (WORKERS={max(there, 1)}) '
        'or for another queue (OPTIONS="queue=…").'
    )


def _advice_without_jobs(client, there):
    if client.cluster is not None:
        first = "Look at the workers' log"
    else:
        first = f"Start them with `dask worker {client.scheduler.address}`"
    fewer = f", or ask for fewer: WORKERS={there}" if there else ""
    return f'{first}, wait longer (OPTIONS="timeout=3600"){fewer}.'
