"""One attempt, as the client sees it: what it knows of the ranks, and how it hears of them.

`start` settles where checkpoints are, hands over tables, has rank 0's worker open the socket at
which the ranks meet, and submits a task for each rank; `monitor` follows and ends them. What is
known of its ranks is in an `AttemptState`; what that means, and what a user reads of it, is in
`outcome`. Relies on the agents' messages and on the scheduler, which says when a worker is lost.
"""

import contextlib
import functools
import logging
import math
import queue
import time
from collections.abc import Awaitable, Callable
from typing import Any

from dask.utils import format_bytes
from distributed import CancelledError, Client, Future, wait
from distributed.comm import get_address_host

from dask_ranks.client import outcome, rpc
from dask_ranks.client.checkpoints import Checkpoints
from dask_ranks.client.claims import KeepsWorkers
from dask_ranks.client.outcome import AttemptState
from dask_ranks.client.rank import RankState
from dask_ranks.client.tables import Tables
from dask_ranks.messages import TOPIC, CheckpointSaved, Ended, Message, RankSpec, unpack
from dask_ranks.run.job import Job, SchedulerLost
from dask_ranks.run.recorder import Recorder
from dask_ranks.run.run_directory import RunDirectory
from dask_ranks.worker import agent
from ddp_common.errors import Error

ANSWER_TIMEOUT = 5  # seconds that a worker has to answer, or the launch's `timeout` if longer
COPY_TIMEOUT = 600  # seconds that a checkpoint may take to all workers that do not see it
LARGE = 2**20  # bytes of function and arguments
CAUSE_TIMEOUT = 5  # seconds to wait for the cause when a consequence was reported first
KILLED_FOR_MEMORY = "worker-restart-memory"  # the topic of such events of Dask's nannies
SILENT = 5  # seconds after which a worker that sends no heartbeat counts as silent

Inbox = queue.SimpleQueue[dict[str, Any]]  # {}: something else has come that somebody waits for


def open_inbox(client: Client, attempt_id: str) -> Inbox:
    """A queue of all that a client hears of an attempt, from the claim to the release.

    Under the topic of the attempt its agents send messages, and `claims.Claims`, which also
    subscribes, which of its workers are lost. It is filled on the client's event loop.
    """
    topic = TOPIC + attempt_id
    inbox: Inbox = queue.SimpleQueue()

    def on_event(stamped: tuple[float, dict[str, Any]]) -> None:
        inbox.put(stamped[1])
        if "released" in stamped[1]:
            del client._event_handlers[topic]

    # Dask's own `unsubscribe_topic` would keep it
    client._event_handlers[topic] = on_event
    return inbox


class Unreachable(Error):
    """A worker has not answered, and the scheduler has not lost it."""


class Attempt:
    """One start of all ranks, of the one or more that a run has."""

    def __init__(
        self,
        client: Client,
        attempt_id: str,
        addresses: list[str],
        inbox: Inbox,
        directory: RunDirectory,
        job: Job,
        number: int,
    ):
        self.client = client
        self.attempt_id = attempt_id
        self.addresses = addresses  # of the workers, in rank order
        self.inbox = inbox
        self.directory = directory
        self.job = job
        self.number = number  # among the attempts of its run, the first is 1
        self.recorder = Recorder(directory, job.on_report, shows_all=job.is_script)
        self.state = AttemptState(addresses, directory.path, job.is_script)
        self.ranks = self.state.ranks
        self.checkpoints = Checkpoints(
            client, attempt_id, directory.path / "checkpoints", addresses
        )
        self.began = time.monotonic()
        self.submitted = math.inf  # when the tasks of all ranks were
        self.told_to_stop: float | None = None  # when SIGTERM was passed on to a script
        self.asked = 0.0  # when ranks that make no progress were last asked where they are

    # Hearing

    def take_in(self, timeout: float) -> None:
        """Take in the events that are there; waits for one at most `timeout` seconds."""
        with contextlib.suppress(queue.Empty):
            self._take(self.inbox.get(timeout=timeout))
            while True:
                self._take(self.inbox.get_nowait())

    def wait_until(self, is_so: Callable[[], bool], timeout: float) -> bool:
        """Take in events until `is_so()`, at most `timeout` seconds; returns whether it is."""
        return rpc.wait_until(is_so, timeout, pause=self.take_in)

    def note_end(self, rank: int, task: Future) -> None:
        """Have it taken in that the Dask task of a rank has ended."""
        self.inbox.put({"rank": rank, "task": task.status, "reason": rpc.why_cancelled(task)})

    def _take(self, event: dict[str, Any]) -> None:
        match event:
            case {"rank": rank, "messages": packed}:
                for message in unpack(packed):
                    self._take_message(rank, message)
            case {"lost": address}:
                self.state.lose_worker(address)
                self.directory.log(f"the worker at {address} was lost")
            case {"rank": rank, "task": "error"} if self.ranks[rank].how is None:
                task = self.ranks[rank].task
                assert task is not None, "it has ended"
                ended = Ended("raised", message=f"Its agent failed: {task.exception()!r}")
                self._take_message(rank, ended)
            case {"task": "cancelled", "reason": reason}:
                # By somebody else, or by the client, which has lost the scheduler or is closed.
                # What we cancel in the end is heard of when the outcome is known.
                self.state.cancel(reason)

    def _take_message(self, rank: int, message: Message) -> None:
        self.state.take(rank, message, time.monotonic())
        self.recorder.take(rank, message)
        match message:
            case CheckpointSaved():
                address = self.addresses[rank]
                lost = self.checkpoints.announced(address, message.name, message.keep)
                if lost is not None:
                    self.directory.problem(f"A checkpoint could not be fetched: {lost}", "fetch")
            case Ended() if self.ranks[rank].how != "done":
                self.directory.log(f"rank {rank} {outcome.in_log(self.ranks[rank])}")

    # Asking

    def wait_for(self, ask: Callable[[], Awaitable], timeout: float) -> Any:
        """What `ask` returns, which awaits workers through Dask; at most `timeout` seconds.

        Raises `RankFailed` if a worker is lost meanwhile, and `Error` for workers that do not
        answer in time, or that have no `ddp_common`.
        """
        answer = rpc.begin(self.client, ask)
        answer.add_done_callback(lambda _: self.inbox.put({}))
        self.wait_until(lambda: answer.done() or self._is_over(), timeout)
        if not answer.done():
            self._raise_if_over()
            raise rpc.no_word(self._silent() or self.addresses, timeout)
        try:
            return answer.result()
        except (OSError, CancelledError) as error:
            raise self.cause_of(error) from None
        except Exception as error:
            rpc.refuse_without_package(error)
            raise

    def cause_of(self, error: BaseException) -> Exception:
        """The exception for a worker, or the scheduler, that Dask could not reach."""
        self.wait_until(self._is_over, CAUSE_TIMEOUT)
        self._raise_if_over()
        return Unreachable(f"A worker cannot be reached: {error}. Launch again.")

    def _is_over(self) -> bool:
        is_connected = self.client.status == "running"
        return bool(self.state.failed()) or self.state.is_cancelled or not is_connected

    def _raise_if_over(self) -> None:
        if self.state.failed():
            raise self.failure_of(self.state.failed()[0])
        if self._is_over():
            raise self.cancelled()

    def _silent(self) -> list[str]:
        """The workers that have sent no heartbeat of late."""
        workers = rpc.known_workers(self.client)
        # By the scheduler's clock, as all of them are
        seen = {each: workers.get(each, {}).get("last_seen", 0) for each in self.addresses}
        return [each for each in self.addresses if max(seen.values()) - seen[each] > SILENT]

    # What it ends with

    def tasks(self) -> list[Future]:
        """Our tasks of all ranks: those that hand over tables, and the agents'."""
        futures = [future for rank in self.ranks for future in (rank.tables, rank.task)]
        return [future for future in futures if future is not None]

    def failure_of(self, rank: RankState) -> Exception:
        """The exception for a rank that failed, or for the restart of the cluster that ended it.

        A restart kills the workers, so it may be heard of last. Our futures know of it first.
        """
        if any(rpc.why_cancelled(task) == rpc.RESTARTED for task in self.tasks()):
            self.state.cancel(rpc.RESTARTED)
            return self.cancelled()
        if rank.how in outcome.WORKER_ENDED:
            rank.ended.message = self._why_lost(rank.address)
        return outcome.rank_failed(self.state, rank)

    def _why_lost(self, address: str) -> str:
        """What the queue says of the job of a worker, or the worker's nanny; '' if nothing."""
        with contextlib.suppress(OSError):  # the scheduler is lost as well
            for _, event in self.client.get_events(KILLED_FOR_MEMORY):
                if event["worker"] == address:
                    return (
                        f"its nanny killed it, as it had {format_bytes(event['rss'])} of memory, "
                        "more than its memory_limit allows"
                    )
        return self.client.why_lost(address) if isinstance(self.client, KeepsWorkers) else ""

    def cancelled(self) -> Exception:
        """The exception for tasks that were cancelled, and not by us."""
        address = getattr(self.client.scheduler, "address", "?")
        error = outcome.cancelled(self.state, address, self.client.status == "running")
        self.directory.log(str(error))
        if isinstance(error, SchedulerLost):
            # Dask would print how its attempts to reconnect end.
            logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        return error


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
    for spec, rank in zip(_specs(attempt, answers[first[0]]), attempt.ranks):
        key = f"ddp-rank-{attempt.attempt_id}-{spec.rank}"
        whole = agent.run_rank, spec, payload, rank.tables
        rank.task = rpc.submit(attempt.client, key, rank.address, *whole)
        rank.task.add_done_callback(functools.partial(attempt.note_end, spec.rank))
    attempt.submitted = time.monotonic()


def _specs(attempt: Attempt, store: tuple[str, int]) -> list[RankSpec]:
    """For each rank the variables that torchrun sets, all of them, and the folder of checkpoints.

    `store` is the host and the port of the ranks' key-value store.
    """
    hosts = [get_address_host(address) for address in attempt.addresses]
    groups = list(dict.fromkeys(hosts))
    of_all = {
        "WORLD_SIZE": len(hosts),
        "GROUP_WORLD_SIZE": len(groups),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": len(hosts),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": store[1],
        "TORCHELASTIC_RUN_ID": attempt.directory.path.name,
        "TORCHELASTIC_RESTART_COUNT": attempt.number - 1,
        "TORCHELASTIC_MAX_RESTARTS": attempt.job.restarts,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_USE_AGENT_STORE": True,  # `init_process_group()` joins the store
    }
    specs = []
    for rank, (address, host) in enumerate(zip(attempt.addresses, hosts)):
        variables = {
            **of_all,
            "RANK": rank,
            "LOCAL_RANK": hosts[:rank].count(host),
            "LOCAL_WORLD_SIZE": hosts.count(host),
            "GROUP_RANK": groups.index(host),
            "ROLE_RANK": rank,
            "DDP_CHECKPOINTS": attempt.checkpoints.folders[address],
        }
        texts = {name: str(value) for name, value in variables.items()}
        specs.append(RankSpec(attempt.attempt_id, rank, texts, attempt.job.is_script))
    return specs
