"""One attempt, as the client sees it: start the ranks, follow what they say, end them.

What is known of them is in `known`; what to make of it is in `verdict`; what a person is told
is in `wording`. Relies on the agents' messages and on the scheduler, which says when a worker
is lost. Promises: the first failure ends the attempt; a rank that makes no progress is found;
afterwards the ranks are gone, and the last checkpoints are here.
"""

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from distributed import CancelledError, Client, Future
from distributed.comm import get_address_host

from ddp_common.client import told, wording
from ddp_common.client.checkpoints import Checkpoints
from ddp_common.client.fetching import fetch_result, open_result_here
from ddp_common.client.inbox import FromAgent, TaskEnded, WorkerLost
from ddp_common.client.known import RESTARTED, Known, as_meant
from ddp_common.client.listener import Listener
from ddp_common.client.newcomers import Newcomers
from ddp_common.client.pace import Paces
from ddp_common.client.patience import Patience
from ddp_common.client.tables import Tables
from ddp_common.client.verdict import (
    Failed,
    Finished,
    GoesOn,
    SchedulerGone,
    Stopped,
    Verdict,
    stalled,
    verdict,
)
from ddp_common.errors import Error, RankFailed, RunStopped, first_line
from ddp_common.hangs.blame import Standstill, blame, where_all_are
from ddp_common.messages import (
    CheckpointFailed,
    CheckpointSaved,
    Ended,
    FileKept,
    Line,
    Message,
    Pace,
    ParameterNorms,
    Position,
    RankSpec,
    Report,
    Returned,
    Started,
    Whereabouts,
    shows_training,
)
from ddp_common.ranks.checkpoint_files import step_of
from ddp_common.ranks.process import training_stack
from ddp_common.run.config import describe, may_be_written
from ddp_common.run.progress import Progress
from ddp_common.run.replicas import Replicas
from ddp_common.run.run_directory import RunDirectory
from ddp_common.worker import agent
from ddp_common.worker.result import LARGE_RESULT
from ddp_common.worker.spool import take_file

GONE_TIMEOUT = 5  # seconds to wait for ranks to be gone once they were told
UNSTARTED_TIMEOUT = 1  # the same for ranks that never started, which say nothing
CAUSE_TIMEOUT = 5  # seconds to wait for the cause when a consequence was reported first
CAUSE_TIMEOUT_WHEN_RETURNED = 0.2  # where a peer whose function has returned is the likely cause
STACKS_TIMEOUT = 45  # seconds that workers have to say where their ranks are
LOOK_INTERVAL = 0.5  # seconds
HELD_UP = 2.0  # seconds between two messages or looks: more, and this program itself stood still
SHORT_LOOK = 0.02  # seconds, while a cause is waited for
LARGE = 2**20  # bytes of function and arguments


class MadeRoom(RunStopped):
    """The ranks have left, after a step and having saved, to go on with more of them."""


class Attempt:
    """One start of all ranks, of the one or more that a run has; `run` does it all."""

    def __init__(
        self,
        client: Client,
        attempt_id: str,
        addresses: list[str],
        inbox: queue.SimpleQueue,
        directory: RunDirectory,
        stall_timeout: float | None,
        tables: Tables,
        listener: Listener,
        grow: bool = False,
    ):
        self.client = client
        self.attempt_id = attempt_id
        self.addresses = addresses
        self.inbox = inbox
        self.directory = directory
        self.stall_timeout = stall_timeout
        self.tables = tables
        self.listener = listener
        self.handed: list[Future | None] = [None] * len(addresses)  # the tables of each rank
        self.known = Known(addresses)
        self.without_worker: set[int] = set()  # ranks that had lost theirs when the attempt ended
        self.futures: list[Future] = []
        self._checkpoints: Checkpoints | None = None  # until the attempt has begun
        self.newcomers = Newcomers(client, len(addresses)) if grow else None
        self.makes_room = False  # the ranks are asked to leave, to go on with newcomers
        self.saved_step = 0  # of the newest checkpoint that this attempt has saved
        self.progress = Progress()
        self.paces = Paces(len(addresses))
        self.replicas = Replicas(len(addresses))
        self.began = time.monotonic()
        self.looked = self.began  # when `_look_around` was last called
        self.turned = self.began  # when the loop over messages last came to its end
        # What is to be written into config.json; of a resumed run once it has begun
        self.config: dict | None = None

    def run(self, payload: bytes, previous: Exception | None = None, number: int = 1) -> Any:
        """Start the ranks, follow them, and have them gone; returns rank 0's result.

        `payload` is the pickled training function with its arguments. `previous` is what ended the
        attempt before this one: a failure, or `RunStopped` where that has made room for newcomers;
        `number` counts the attempts. Raises `RankFailed`, `RankStalled`, `RunStopped`,
        `SchedulerLost` or `Error`.
        """
        told.attempts_running += 1
        try:
            self._start(payload, previous, number)
            return self._follow()
        except (OSError, CancelledError):  # a worker, or the scheduler, cannot be reached
            failure = self._failure_at_start()
            if failure is None:
                raise
            raise failure from None
        finally:
            self.without_worker = self.known.without_worker()  # before we cancel any
            if self.newcomers is not None:
                self.newcomers.let_go()
            try:
                self._end()
            finally:
                told.attempts_running -= 1

    @property
    def checkpoints(self) -> Checkpoints:
        assert self._checkpoints is not None, "the attempt has begun"
        return self._checkpoints

    def has_shrunk(self, failure: Exception) -> bool:
        """Whether it has lost a worker, after it had come further than when it began."""
        has_lost = bool(self.without_worker)
        return isinstance(failure, RankFailed) and has_lost and self._came_further()

    def _came_further(self) -> bool:
        if self._checkpoints is None:
            return False
        resumed = self.checkpoints.resumed
        return self.saved_step > (step_of(resumed) if resumed is not None else 0)

    # Starting

    def _start(self, payload: bytes, previous: Exception | None, number: int) -> None:
        """Begin the attempt, up to a submitted task for each rank.

        Describes it, settles where checkpoints are, and opens the socket of the store.
        """
        with contextlib.suppress(OSError):  # it says so itself
            self.directory.check()
        self.config = describe(self.addresses, self.directory.path, self.directory.function)
        if may_be_written(self.config, self.directory.path):
            self._write_config()
        self._checkpoints = Checkpoints(
            self.client, self.attempt_id, self.directory.path / "checkpoints", self.addresses
        )
        if previous is not None:
            self._note_restart(previous, number)
        if self.tables.given:
            self._hand_over_tables()
        first = self.addresses[:1]
        (store,) = self.client.run(agent.listen, self.attempt_id, workers=first).values()
        if len(payload) > LARGE:
            # To one worker, from which the others take it: not through the scheduler
            payload = self.client.scatter(payload, workers=first, hash=False)
        for spec in self._specs(store):
            self._submit(spec, payload)

    def _hand_over_tables(self) -> None:
        """Have every worker lay ready what its rank gets.

        Raises `RankFailed` if a worker is lost meanwhile, and `Error` for tables that cannot be
        handed over.
        """
        tables = self.tables
        assigned = tables.assign(self.addresses)
        tables.check_memory(self.addresses, assigned)
        for line in tables.remarks(assigned, len(self.addresses)):
            self.directory.log(line)
            self.progress.note(line)
        futures = tables.hand_over(self.addresses, assigned, self.attempt_id)
        self.handed[:] = futures
        while not all(future.done() for future in futures):
            self._take_next(SHORT_LOOK)
            if self.known.failed():
                rank = min(self.known.failed())
                raise self._failure_of(rank)
        # Dask says that a future is done just before it says of which type its result is.
        self.client.sync(asyncio.sleep, 0)
        for rank, future in enumerate(futures):
            if future.status == "cancelled":  # as by a scheduler that is lost
                raise CancelledError(future.key)
            if future.status == "error":
                raise wording.not_handed_over(rank, future.exception())
            if future.type is Error:
                raise future.result()
        tables.handed_over(self.addresses, assigned, self.attempt_id)

    def _write_config(self) -> None:
        assert self.config is not None, "it is to be written yet"
        self.directory.write_json("config.json", self.config)
        self.config = None

    def _note_restart(self, previous: Exception, number: int) -> None:
        grows = isinstance(previous, MadeRoom)
        reason = first_line(previous)
        resumed = self.checkpoints.resumed
        step = step_of(resumed) if resumed is not None else 0
        ranks = len(self.addresses)
        event = {
            "time": time.time(),
            "event": "grow" if grows else "restart",
            "attempt": number,
            "reason": reason,
            "step": step,
            "ranks": ranks,
        }
        self.directory.record(getattr(previous, "rank", 0), event)
        if grows:
            text = f"Going on with {ranks} rank(s) from step {step}: more workers have come"
        else:
            text = f"Restart {number - 1} on {ranks} rank(s) from step {step}. Why: {reason}"
        self.directory.log(text)
        self.progress.note(text)

    def _specs(self, store: tuple[str, int]) -> list[RankSpec]:
        hosts = [get_address_host(address) for address in self.addresses]
        trace = os.environ.get("DDP_TRACE", "")
        return [
            RankSpec(
                attempt=self.attempt_id,
                rank=rank,
                world_size=len(hosts),
                local_rank=hosts[:rank].count(host),
                local_world_size=hosts.count(host),
                store=store,
                environment={
                    "DDP_CHECKPOINTS": self.checkpoints.place[address],
                    "DDP_TRACE": trace,
                },
            )
            for rank, (address, host) in enumerate(zip(self.addresses, hosts))
        ]

    def _submit(self, spec: RankSpec, payload: Any) -> None:
        """Submit a task that only this rank's worker may run."""
        future = self.client.submit(
            agent.run_rank,
            spec,
            payload,
            self.handed[spec.rank],
            workers=[self.addresses[spec.rank]],
            pure=False,
            retries=0,
            key=f"ddp-rank-{self.attempt_id}-{spec.rank}",
            priority=10,
        )
        self.futures.append(future)

        def note_end(done: Future) -> None:
            self.inbox.put(TaskEnded(spec.rank, done.status, _why_cancelled(done)))

        future.add_done_callback(note_end)

    def _failure_at_start(self) -> Exception | None:
        """What became of a worker, or the scheduler, that was asked and did not answer.

        None if both are there.
        """
        patience = Patience(CAUSE_TIMEOUT)
        while (
            not self.known.failed() and self.client.status == "running" and not patience.is_over()
        ):
            self._take_next(SHORT_LOOK)
        failed = self.known.failed()
        if failed:
            return self._failure_of(min(failed))
        if self.known.scheduler_lost or self.client.status != "running":
            return self._scheduler_gone()
        return None

    # Following

    def _follow(self) -> Any:
        """Take in messages until every rank is done; returns rank 0's result.

        Raises at the first failure.
        """
        decision = verdict(self.known)
        while isinstance(decision, GoesOn):
            self._take_next(LOOK_INTERVAL)
            self._tell_listener()
            self._forgive_a_standstill()
            if time.monotonic() - self.looked > LOOK_INTERVAL and self.inbox.empty():
                self._look_around()
            decision = verdict(self.known)
            if isinstance(decision, Failed) and decision.is_consequence:
                decision = self._wait_for_the_cause()
        if not isinstance(decision, Finished):
            raise self._explained(decision)
        return self._result()

    def _forgive_a_standstill(self) -> None:
        """Where this program stood still, what ranks have said meanwhile is not read yet."""
        now = time.monotonic()
        if now - self.turned > HELD_UP:
            self.known.forgive(now - self.turned, now)
        self.turned = now

    def _tell_listener(self) -> None:
        """Call `on_report` with the records that it does not have.

        In between, what the ranks say is taken in; if one has failed, the rest is told later.
        """
        while self.listener.is_behind() and not self.known.failed():
            self.listener.tell_next()
            self._take_what_is_there()

    def _wait_for_the_cause(self) -> Verdict:
        """All who failed have lost a peer: wait a moment for the one who did not."""
        timeout = CAUSE_TIMEOUT_WHEN_RETURNED if self.known.returned else CAUSE_TIMEOUT
        patience = Patience(timeout)
        while _is_consequence(verdict(self.known)) and not patience.is_over():
            self._take_next(SHORT_LOOK)
        # Where this program was held up, the cause may have come meanwhile.
        self._take_what_is_there()
        return verdict(self.known)

    def _explained(self, decision: Verdict) -> Exception:
        """The exception for an attempt that did not finish."""
        if isinstance(decision, Failed):
            return self._failure_of(decision.rank)
        if isinstance(decision, SchedulerGone):
            return self._scheduler_gone()
        assert isinstance(decision, Stopped)
        who = wording.who_was_told(self.known)
        step = wording.last_step(self.known)
        if self.makes_room and who == [0] and not told.stop_requested:
            return MadeRoom("More workers have come.", step=step, directory=self.directory.path)
        self.directory.log(wording.in_log_of_a_stop(self.known))
        return wording.run_stopped(self.known, self.checkpoints.newest(), self.directory.path)

    def _failure_of(self, rank: int) -> Exception:
        """The exception for a rank that failed, or for the restart of the cluster that ended it.

        A restart kills the workers, so it may be heard of last. Our futures know of it first.
        """
        tasks = [future for future in (*self.futures, *self.handed) if future is not None]
        if any(_why_cancelled(task) == RESTARTED for task in tasks):
            self.known.tasks_cancelled(RESTARTED)
            return self._scheduler_gone()
        return wording.rank_failed(self.known, rank, self.directory.path)

    def _scheduler_gone(self) -> Exception:
        by_loss = self.known.cancelled_by == "scheduler-connection-lost"
        if self.client.status == "running" and not by_loss:
            self.directory.log(f"{wording.what_was_cancelled(self.known)}; the ranks end")
            return wording.cancelled(self.known, self.directory.path)
        self.directory.log("the connection to the scheduler was lost")
        # It would print how its attempts to reconnect end.
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        address = getattr(self.client.scheduler, "address", "?")
        return wording.scheduler_lost(address, self.directory.path)

    def _look_around(self) -> None:
        """See to what no message tells.

        That is: this program shall stop, or a rank makes no progress.
        """
        now = time.monotonic()
        self.looked = now
        if told.interrupted:
            raise KeyboardInterrupt
        if told.stop_requested:
            self.directory.say_ending()
        if self._could_grow() and not self.makes_room:
            self.makes_room = True
            self.directory.log("more workers have come: the ranks save, and leave to go on there")
        must_leave = told.stop_requested or self.makes_room
        if must_leave and self.known.moved and not self.known.stopped():
            # Said again until it is heard: a rank may not listen yet.
            self.client.run(agent.tell_to_stop, workers=self.addresses[:1], on_error="ignore")
        stuck = stalled(self.known, self.stall_timeout, now)
        if stuck:
            raise self._stalled(stuck)

    def _could_grow(self) -> bool:
        """Whether newcomers are ready, and nothing is lost if the ranks leave now.

        That is so once all of them are in a sampler's loop, from which they leave together and
        saved, and a checkpoint has shown that they do save.
        """
        if self.newcomers is None or not self._came_further():
            return False
        all_are_in_a_loop = all(self.known.step_of(rank) for rank in range(len(self.addresses)))
        return all_are_in_a_loop and self.newcomers.are_ready()

    def _stalled(self, stuck: list[int]) -> Exception:
        assert self.stall_timeout is not None, "without it no rank counts as stalled"
        found = self._where_ranks_are()
        states = {rank: answer.state if answer else None for rank, answer in found.items()}
        stacks = {
            rank: training_stack(answer.stack)
            if answer and answer.stack is not None
            else "(no answer from its worker)"
            for rank, answer in found.items()
        }
        records = {
            rank: answer.collectives
            for rank, answer in found.items()
            if answer and answer.collectives is not None
        }
        standstill = Standstill(
            places=[f"worker at {address}" for address in self.addresses],
            stuck=stuck,
            steps={rank: self.known.step_of(rank) for rank in found},
            moved=self.known.moved,
            returned={rank: at.get("step", 0) for rank, at in self.known.returned.items()},
            states=states,
            stacks=stacks,
            records=records,
        )
        rank, why = blame(standstill)
        waits, details = where_all_are(records, stacks)
        self.directory.log(f"rank {rank} stalled: {why}\n{details}")
        return wording.rank_stalled(
            self.known, rank, why, details, waits, stacks, self.stall_timeout, self.directory.path
        )

    def _where_ranks_are(self) -> dict[int, Whereabouts | None]:
        """Where each rank that lives is.

        None where its worker does not answer in time. A rank that is suspended is asked last: it
        goes on then, and so would the others before they have said where they waited.
        """
        alive = {
            rank: address
            for rank, address in enumerate(self.addresses)
            if rank not in self.known.ended
        }
        answers: dict[str, Whereabouts | None] = {}

        def ask(addresses: list[str], wake: bool) -> None:
            answers.update(
                self.client.run(agent.where_is_it, wake=wake, workers=addresses, on_error="ignore")
            )

        def ask_all() -> None:
            ask(list(alive.values()), wake=False)
            asleep = [
                place for place, answer in answers.items() if answer and answer.stack is None
            ]
            if asleep:
                ask(asleep, wake=True)

        asking = threading.Thread(target=ask_all, daemon=True)  # a worker may not answer at all
        asking.start()
        asking.join(STACKS_TIMEOUT)
        return {rank: answers.get(address) for rank, address in alive.items()}

    # Taking in what is said

    def _take_next(self, timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._take(self.inbox.get(timeout=timeout))

    def _take_what_is_there(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self.inbox.get_nowait())

    def _take(self, event: FromAgent | WorkerLost | TaskEnded) -> None:
        if isinstance(event, FromAgent):
            for message in event.messages():
                self._take_message(event.rank, as_meant(message))
        elif isinstance(event, WorkerLost):
            self.known.lose_worker(event.address)
        elif event.status == "error" and event.rank not in self.known.ended:
            error = self.futures[event.rank].exception()
            self.known.ended[event.rank] = Ended("raised", message=f"Its agent failed: {error!r}")
        elif event.status == "cancelled":
            # Not by us: a client cancels its futures when it loses the scheduler or is closed.
            self.known.tasks_cancelled(event.reason)

    def _take_message(self, rank: int, message: Message) -> None:
        self.known.take(rank, message, time.monotonic())
        if self.config is not None and shows_training(message):
            self._write_config()
        match message:
            case Report():
                self.directory.record(rank, message.values)
                self.progress.record(message.values, rank)
            case Pace():
                self._take_pace(rank, message)
            case Returned():
                pass  # `known` has taken note of it
            case Position():
                self.progress.position(message.known())
            case Line():
                self.directory.log(f"[rank {rank}] {message.text}")
            case FileKept():
                self._take_file(rank, message)
            case CheckpointFailed():
                self.directory.not_saved(message.why)
            case CheckpointSaved():
                self.saved_step = max(self.saved_step, step_of(Path(message.name)))
                self.directory.saved()
                self.checkpoints.announced(self.addresses[rank], message.name, message.keep)
            case ParameterNorms():
                problem = self.replicas.take(rank, message)
                if problem is not None:
                    self.directory.problem(problem, "drifted apart")
            case Started():
                self.directory.log(f"rank {rank} started: process {message.pid} on {message.host}")
            case Ended():
                if message.how not in ("done", "cancelled"):
                    self.directory.log(f"rank {rank} {wording.in_log(message)}")

    def _take_pace(self, rank: int, sample: Pace) -> None:
        rows, slow = self.paces.take(rank, sample, time.monotonic())
        for row in rows:
            self.directory.add_line("pace.jsonl", {"time": time.time(), **row})
        for slow_rank, sentence in slow:
            text = f"rank {slow_rank} on {self.known.hosts.get(slow_rank, '?')} {sentence}"
            self.directory.log(text)
            if self.progress.mode == "bar":  # somebody looks on
                self.progress.note(text)

    def _take_file(self, rank: int, message: FileKept) -> None:
        worker = [self.addresses[rank]]
        answers = self.client.run(take_file, message.token, workers=worker, on_error="ignore")
        if not answers:  # its worker has died
            self.directory.problem(
                f"The file {message.name} of rank {rank} was lost with its worker.",
                f"lost {message.name}",
            )
        for content in answers.values():
            self.directory.save(message.name, content)

    # The result

    def _result(self) -> Any:
        import torch  # not at the top: it takes a second, and only a result needs it

        place = self.known.ended[0]
        assert place.result_size is not None, "rank 0 has finished"
        if place.result_size > LARGE_RESULT:
            size = f"{place.result_size / 2**20:,.0f} MiB"
            self.directory.log(f"fetching the result of rank 0: {size}")
            self.progress.note(f"Fetching the result of rank 0: {size}.")
        pickled = open_result_here(place)
        if pickled is None:
            pickled = fetch_result(self.futures[0], self._look_while_fetching)
        if pickled is None:
            raise self._result_is_lost()
        try:
            # Our own ranks' pickle
            result = torch.load(pickled, map_location="cpu", weights_only=False)
        except Exception as error:  # whatever the classes in it do when they are made again
            self.directory.log(
                f"all ranks finished; the result of rank 0 cannot be loaded here: {error!r}"
            )
            raise wording.unreadable_result(error, self.directory.path) from None
        seconds = time.monotonic() - self.began
        self.directory.log(f"finished: {len(self.addresses)} rank(s), {seconds:.1f} s")
        return result

    def _look_while_fetching(self) -> bool:
        """Whether it is still worth while to wait for the result.

        Dask would wait for a dead worker for ever.
        """
        self._take_what_is_there()
        self._look_around()
        return 0 not in self.known.lost_late and not self.known.scheduler_lost

    def _result_is_lost(self) -> Exception:
        self._take_what_is_there()
        if 0 in self.known.lost_late:
            self.known.ended[0] = Ended("lost")
            return self._failure_of(0)
        return self._scheduler_gone()

    # Ending

    def _end(self) -> None:
        """Have the ranks gone and the last checkpoints here.

        It raises nothing but what a person does: how the run ended is known already.
        """
        # Asked before we cancel tasks ourselves, which looks like a loss.
        connected = not self.known.scheduler_lost and self.client.status == "running"
        try:
            if connected:
                self._end_ranks()
                self._finish_fetching()
        except (OSError, CancelledError, Error) as error:
            self.directory.problem(f"After the run had ended: {error}", "end")
        finally:
            self._forget_tasks()
            self.progress.close()

    def _end_ranks(self) -> None:
        """Cancel what still runs and wait until every rank says that it is gone."""
        running = [future for future in self.futures if not future.done()]
        if running:
            self.client.cancel(running, force=True)
        until_gone = Patience(GONE_TIMEOUT)
        until_nothing_starts = Patience(UNSTARTED_TIMEOUT)
        while not until_gone.is_over():
            pending = set(range(len(self.futures))) - set(self.known.ended)
            if not pending:
                return
            none_has_started = not pending & set(self.known.hosts)
            if until_nothing_starts.is_over() and none_has_started:
                return
            self._take_next(SHORT_LOOK)

    def _forget_tasks(self) -> None:
        """Let go of all tasks, and so of their results.

        One that hands over tables may still wait for a worker that is gone.
        """
        for future in [*self.futures, *self.handed]:
            if future is not None:
                future.release()

    def _finish_fetching(self) -> None:
        """Get the last checkpoints of workers that do not see the run directory.

        They may still be on their way.
        """
        if self._checkpoints is None:
            return
        lost = {rank for rank, end in self.known.ended.items() if end.how == "lost"}
        lost |= self.known.lost_late
        problem = self._checkpoints.close({self.addresses[rank] for rank in lost})
        if problem:
            self.directory.problem(
                f"The newest checkpoint could not be fetched: {problem}", "fetch"
            )


def _is_consequence(decision: Verdict) -> bool:
    return isinstance(decision, Failed) and decision.is_consequence


def _why_cancelled(future: Future) -> str | None:
    """Dask's word for why a task was cancelled; None if it was not."""
    if future.status != "cancelled":
        return None
    assert future._state is not None, "it has a status"
    return getattr(future._state.exception, "reason", None)
