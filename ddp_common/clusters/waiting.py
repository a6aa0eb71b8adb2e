"""Waiting for workers, with the queue's own word on why they do not come."""

import sys
import time

from ddp_common.clusters import batch, queues
from ddp_common.errors import Error


def wait_for_workers(client, count, at_least=None):
    """Until `count` workers are there; or, once the time is over, `at_least` so many. Says what the queue says whenever it changes."""
    began, looked, said = time.monotonic(), 0.0, None
    while (there := len(client.workers())) < count:
        now = time.monotonic()
        if client.jobs is not None and now - looked > min(
            batch.LONGEST_INTERVAL, max(batch.LOOK_INTERVAL, (now - began) / 10)
        ):
            states, looked = _look_at_jobs(client), now
            line = f"Waiting for workers: {there} of {count}. Jobs: {queues.summary(states)}"
            if line != said:
                print(line, file=sys.stderr, flush=True)
            said = line
        if now - began > client.timeout:
            if at_least and there >= at_least:
                print(
                    f"Going on with {there} of {count} workers: the others did not come within {client.timeout:g} s.",
                    file=sys.stderr,
                )
                return
            raise Error(_too_late(client, there, count))
        time.sleep(0.05)
    if client.jobs is not None:
        client.jobs.note_arrivals(client.workers())


def _look_at_jobs(client):
    """The jobs' states. Those that have ended are submitted anew if their workers had been there, else it is an `Error`."""
    client.jobs.note_arrivals(client.workers())
    states = client.jobs.states() or {}
    over = ended(states)
    for job, reason in over.items():
        if job not in client.jobs.arrived:
            raise Error(
                f"Job {client.cluster.workers[job].job_id} ended before its worker came ({reason}).\n{client.jobs.log(job)}\nSet right what it "
                "says; DRY=1 prints the job script, `make doctor` checks the usual causes."
            )
    if over:
        client.replace(over)
        client.jobs.submit(client.expected)
    return states


def ended(states):
    """Of the jobs in `states` (None: the queue does not answer) those that are over: name -> why."""
    return {job: reason for job, (kind, reason) in (states or {}).items() if kind == queues.ENDED}


def _too_late(client, there, count):
    message = f"{there} of {count} workers came within {client.timeout:g} s."
    if client.jobs is None:
        missing = (
            "Look at the workers' log"
            if client.cluster is not None
            else f"Start them with `dask worker {client.scheduler.address}`"
        )
        fewer = f", or ask for fewer: WORKERS={there}" if there else ""
        return f'{message} {missing}, wait longer (OPTIONS="timeout=3600"){fewer}.'
    states = client.jobs.states()
    queue = queues.summary(states) if states is not None else "nothing, it does not answer"
    logs = "\n".join(
        client.jobs.log(job)
        for job, (kind, _) in (states or {}).items()
        if kind == queues.RUNNING and job not in client.jobs.arrived
    )
    return (
        f"{message} {client.jobs.system.name} says of the jobs: {queue}. They were cancelled.\n"
        + (f"{logs}\n" if logs else "")
        + f'Wait longer (OPTIONS="timeout=3600"), ask for fewer (WORKERS={max(there, 1)}) or for another queue (OPTIONS="queue=…").'
    )
