"""One attempt, as the client sees it: start the ranks, follow what they say, end them.

What is known of them is in an `AttemptState`; what it means, and what a person reads of it, is in
`outcome`. Relies on the agents' messages and on the scheduler, which says when a worker is lost.
Promises: the first failure ends the attempt; a rank that makes no progress is found; afterwards
the ranks are gone, and the last checkpoints are here.
"""

import concurrent.futures
import contextlib
import io
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from distributed import CancelledError, Client, Future, wait
from distributed.comm import get_address_host

from ddp_common.client import hangs, outcome, signals
from ddp_common.client.asking import ask_each, known_workers, refuse_without_package
from ddp_common.client.checkpoints import Checkpoints
from ddp_common.client.inbox import (
    RESTARTED,
    Event,
    FromAgent,
    Inbox,
    TaskEnded,
    WorkerLost,
    why_cancelled,
)
from ddp_common.client.outcome import AttemptState, Failed, Outcome
from ddp_common.client.tables import Tables
from ddp_common.errors import Error, SchedulerLost, first_line
from ddp_common.messages import (
    CheckpointFailed,
    CheckpointSaved,
    Ended,
    File,
    Line,
    Message,
    ParameterNorms,
    Position,
    RankSpec,
    Report,
    Started,
    Whereabouts,
    shows_training,
    unpack,
)
from ddp_common.ranks.checkpoint_files import checkpoints, step_of
from ddp_common.run.description import describe
from ddp_common.run.places import shown
from ddp_common.run.progress import Progress
from ddp_common.run.replicas import Replicas
from ddp_common.run.run_directory import RunDirectory
from ddp_common.worker import agent

ANSWER_TIMEOUT = 5  # seconds that a worker has to answer, or the launch's `timeout` if longer
START_TIMEOUT = 600  # seconds that a rank may take to start once the others have
GONE_TIMEOUT = 7  # seconds to wait for ranks to be gone: more than an agent takes at most
UNSTARTED_TIMEOUT = 1  # the same for ranks that never started, which say nothing
CAUSE_TIMEOUT = 5  # seconds to wait for the cause when a consequence was reported first
CAUSE_TIMEOUT_WHEN_RETURNED = 0.2  # where a peer whose function has returned is the likely cause
WHEREABOUTS_TIMEOUT = 20  # seconds that ranks have to say where they are, on a busy machine
LOOK_INTERVAL = 0.5  # seconds
SHORT_LOOK = 0.02  # seconds, while something is expected at any moment
LARGE = 2**20  # bytes of function and arguments
SILENT = 5  # seconds after which a worker that sends no heartbeat counts as silent
WARNING = re.compile(r"\w*Warning: ")


class Attempt:
    """One start of all ranks, of the one or more that a run has; `run` does it all."""

    def __init__(
        self,
        client: Client,
        attempt_id: str,
        addresses: list[str],
        inbox: Inbox,
        directory: RunDirectory,
        tables: Tables,
        timeout: float,
        stall_timeout: float | None,
        on_report: Callable[[dict], Any] | None,
    ):
        self.client = client
        self.attempt_id = attempt_id
        self.addresses = addresses
        self.inbox = inbox
        self.directory = directory
        self.tables = tables
        self.timeout = timeout
        self.stall_timeout = stall_timeout
        self.on_report = on_report
        self.records_told = len(directory.records)  # so many `on_report` has had, or is not to
        self.state = AttemptState(addresses, directory.path)
        self.handed: list[Future | None] = [None] * len(addresses)  # the tables of each rank
        self.futures: list[Future] = []
        self.checkpoints: Checkpoints | None = None  # until the attempt has begun
        self.progress = Progress()
        self.replicas = Replicas(len(addresses))
        self.whereabouts: dict[int, Whereabouts] = {}
        self.shown: set[str] = set()  # lines of rank 0
        self.warnings: dict[str, int] = {}  # of other ranks, and the first that printed it
        self.lines_not_shown = 0
        self.began = time.monotonic()
        self.looked = self.began  # when `_look_around` was last called
        # What is to be written into config.json; of a resumed run once it has begun
        self.config: dict | None = None

    def run(self, payload: bytes, previous: Exception | None, number: int) -> Any:
        """Start the ranks, follow them, and have them gone; returns rank 0's result.

        `payload` is the pickled training function with its arguments. `previous` is what ended the
        attempt before this one; `number` counts the attempts. Raises `RankFailed`, `RankStalled`,
        `RunStopped`, `SchedulerLost`, `Error`, and what `on_report` raises.
        """
        signals.attempts_running += 1
        try:
            try:
                self._start(payload, previous, number)
            except (OSError, CancelledError) as error:
                raise self._cause_of(error) from None
            return self._follow()
        finally:
            try:
                self._end()
            finally:
                signals.attempts_running -= 1

    # Starting

    def _start(self, payload: Any, previous: Exception | None, number: int) -> None:
        """Begin the attempt, up to a submitted task for each rank.

        Describes it, settles where checkpoints are, and opens the socket of the store.
        """
        with contextlib.suppress(OSError):  # it says so itself
            self.directory.check()
        folder = self.directory.path / "checkpoints"
        directory = self.directory
        self.config = describe(directory.path, directory.about, self.addresses, directory.function)
        # While there are checkpoints, config.json says how they were made, until ranks train on
        if not checkpoints(folder):
            self._write_config()
        answer_timeout = max(self.timeout, ANSWER_TIMEOUT)
        self.checkpoints = self._wait_for(
            lambda: Checkpoints(
                self.client, self.attempt_id, folder, self.addresses, self.directory.copy_soon
            ),
            answer_timeout,
        )
        if previous is not None:
            self._note_restart(previous, number)
        if self.tables.given:
            self._hand_over_tables()
        first = self.addresses[:1]
        answers = self._wait_for(
            lambda: self.client.run(agent.listen, self.attempt_id, workers=first), answer_timeout
        )
        if len(payload) > LARGE:
            # To one worker, from which the others take it: not through the scheduler
            payload = self.client.scatter(payload, workers=first, hash=False)
        for spec in self._specs(answers[first[0]]):
            self._submit(spec, payload)

    def _wait_for(self, ask: Callable[[], Any], timeout: float = math.inf) -> Any:
        """What `ask` returns, which asks workers through Dask; at most `timeout` seconds.

        Dask would wait for a worker that is suspended for ever, and for one that is dead half a
        minute. Raises `RankFailed` if a worker is lost meanwhile, and `Error` for workers that do
        not answer in time, or that have no `ddp_common`.
        """
        answer: concurrent.futures.Future = concurrent.futures.Future()

        def fill() -> None:
            try:
                answer.set_result(ask())
            except BaseException as error:  # raised again in the thread of the caller
                answer.set_exception(error)

        threading.Thread(target=fill, daemon=True, name="ddp-asking").start()
        deadline = time.monotonic() + timeout
        while not answer.done():
            concurrent.futures.wait([answer], SHORT_LOOK)
            self._take_what_is_there()
            if time.monotonic() - self.looked > LOOK_INTERVAL:
                self._look_for_lost_workers()
            self._raise_if_lost()
            if time.monotonic() > deadline:
                raise self._no_answer(timeout)
        try:
            return answer.result()
        except (OSError, CancelledError) as error:
            raise self._cause_of(error) from None
        except Exception as error:
            refuse_without_package(error)
            raise

    def _cause_of(self, error: BaseException) -> Exception:
        """The exception for a worker, or the scheduler, that Dask could not reach."""
        deadline = time.monotonic() + CAUSE_TIMEOUT
        while time.monotonic() < deadline:  # wait a moment to hear what was lost
            self._take_next(SHORT_LOOK)
            self._raise_if_lost()
        return Error(f"A worker cannot be reached: {error}. Launch again.")

    def _look_for_lost_workers(self) -> None:
        """Find workers that were lost before our subscription to Dask's events had begun."""
        self.looked = time.monotonic()
        with contextlib.suppress(OSError):  # a lost scheduler is heard of otherwise
            there = known_workers(self.client)
            for address in set(self.addresses) - set(there):
                self._take(WorkerLost(address))

    def _raise_if_lost(self) -> None:
        if self.state.failed():
            raise self._failure_of(min(self.state.failed()))
        if self.state.is_cancelled or self.client.status != "running":
            raise self._cancelled()

    def _no_answer(self, timeout: float) -> Error:
        workers = known_workers(self.client)
        # By the scheduler's clock, as all of them are
        seen = {each: workers.get(each, {}).get("last_seen", 0) for each in self.addresses}
        silent = [each for each in self.addresses if max(seen.values()) - seen[each] > SILENT]
        who = ", ".join(silent or self.addresses)
        return Error(
            f"The worker at {who} did not answer for {timeout:g} s. Is its process suspended "
            "(SIGSTOP, a suspended job), or its host overloaded? Let it go on, or end it and "
            "launch again: no rank was started."
        )

    def _hand_over_tables(self) -> None:
        """Have every worker lay ready what its rank gets.

        Raises `RankFailed` if a worker is lost meanwhile, and `Error` for tables that cannot be
        handed over.
        """
        futures = self.tables.hand_over(self.addresses, self.attempt_id)
        self.handed[:] = futures
        self._wait_for(lambda: wait(futures))
        self.tables.handed_over(futures)

    def _write_config(self) -> None:
        assert self.config is not None, "it is to be written yet"
        self.directory.write_json("config.json", self.config)
        self.config = None

    def _note_restart(self, previous: Exception, number: int) -> None:
        assert self.checkpoints is not None, "the attempt has begun"
        reason = first_line(previous)
        resumed = self.checkpoints.resumed
        step = step_of(resumed) if resumed is not None else 0
        ranks = len(self.addresses)
        event = {
            "time": time.time(),
            "event": "restart",
            "attempt": number,
            "reason": reason,
            "step": step,
            "ranks": ranks,
        }
        self.directory.record(getattr(previous, "rank", 0), event)
        text = f"Restart {number - 1} on {ranks} rank(s) from step {step}. Why: {reason}"
        self.directory.log(text)
        self.progress.note(text, also_in_logs=True)

    def _specs(self, store: tuple[str, int]) -> list[RankSpec]:
        assert self.checkpoints is not None, "the attempt has begun"
        hosts = [get_address_host(address) for address in self.addresses]
        return [
            RankSpec(
                attempt=self.attempt_id,
                rank=rank,
                world_size=len(hosts),
                local_rank=hosts[:rank].count(host),
                local_world_size=hosts.count(host),
                store=store,
                checkpoints=self.checkpoints.place[address],
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
            self.inbox.put(TaskEnded(spec.rank, done.status, why_cancelled(done)))

        future.add_done_callback(note_end)

    # Following

    def _follow(self) -> Any:
        """Take in messages until every rank is done; returns rank 0's result.

        Raises at the first failure.
        """
        decision = outcome.outcome(self.state)
        while decision is Outcome.GOES_ON:
            self._take_next(LOOK_INTERVAL)
            self.tell_records()
            if time.monotonic() - self.looked > LOOK_INTERVAL:
                self._take_what_is_there()
                self._look_around()
            decision = outcome.outcome(self.state)
            if isinstance(decision, Failed) and decision.is_consequence:
                decision = self._wait_for_the_cause()
        if isinstance(decision, Failed):
            raise self._failure_of(decision.rank)
        if decision is Outcome.CANCELLED:
            raise self._cancelled()
        if decision is Outcome.STOPPED:
            assert self.checkpoints is not None, "the attempt has begun"
            stopped = outcome.run_stopped(self.state, self.checkpoints.newest())
            self.directory.log(str(stopped))
            raise stopped
        return self._result()

    def _wait_for_the_cause(self) -> Failed | Outcome:
        """All ranks that failed have lost a peer: wait a moment for the one that did not."""
        timeout = CAUSE_TIMEOUT_WHEN_RETURNED if self.state.returned else CAUSE_TIMEOUT
        deadline = time.monotonic() + timeout
        while True:
            self._take_what_is_there()
            decision = outcome.outcome(self.state)
            is_consequence = isinstance(decision, Failed) and decision.is_consequence
            if not is_consequence or time.monotonic() > deadline:
                return decision
            self._take_next(SHORT_LOOK)

    def _failure_of(self, rank: int) -> Exception:
        """The exception for a rank that failed, or for the restart of the cluster that ended it.

        A restart kills the workers, so it may be heard of last. Our futures know of it first.
        """
        tasks = [future for future in (*self.futures, *self.handed) if future is not None]
        if any(why_cancelled(task) == RESTARTED for task in tasks):
            self.state.cancel(RESTARTED)
            return self._cancelled()
        return outcome.rank_failed(self.state, rank)

    def _cancelled(self) -> Exception:
        address = getattr(self.client.scheduler, "address", "?")
        error = outcome.cancelled(self.state, address, self.client.status == "running")
        self.directory.log(str(error))
        if isinstance(error, SchedulerLost):
            # Dask would print how its attempts to reconnect end.
            logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        return error

    def _look_around(self) -> None:
        """Act on what no message says: this program shall stop, or a rank makes no progress."""
        now = time.monotonic()
        self.looked = now
        if signals.interrupted:
            raise KeyboardInterrupt
        if signals.stop_requested:
            if self.state.moved and not self.state.stopped():
                # Said again until it is heard: a rank may not listen yet.
                ask_each(self.client, agent.tell_to_stop, workers=self.addresses[:1])
        unstarted = sorted(set(range(len(self.addresses))) - set(self.state.hosts))
        if unstarted and now - max(self.began, self.state.last_started) > START_TIMEOUT:
            why = "It has not started: is its host overloaded, or the disk slow that has torch?"
            raise outcome.rank_stalled(self.state, unstarted[0], why, START_TIMEOUT, {}, {})
        stuck = self.state.stalled(self.stall_timeout, now)
        if stuck:
            states = self._ask_where_ranks_are()
            # A rank that has failed meanwhile is the cause
            if outcome.outcome(self.state) is Outcome.GOES_ON:
                raise self._stalled(stuck, states)

    def _stalled(self, stuck: list[int], states: dict[int, str | None]) -> Exception:
        assert self.stall_timeout is not None, "without it no rank counts as stalled"
        standstill = hangs.Standstill(
            addresses=self.addresses,
            stuck=stuck,
            steps={rank: self.state.step_of(rank) for rank in range(len(self.addresses))},
            returned={rank: self.state.step_of(rank) for rank in self.state.returned},
            states=states,
            answers=self.whereabouts,
        )
        rank, why = hangs.name_culprit(standstill)
        waits = hangs.where_ranks_wait(standstill)
        stacks = {each: answer.stack for each, answer in sorted(self.whereabouts.items())}
        self.directory.log(f"rank {rank} stalled: {why}\n{outcome.where_all_are(waits, stacks)}")
        return outcome.rank_stalled(self.state, rank, why, self.stall_timeout, waits, stacks)

    def _ask_where_ranks_are(self) -> dict[int, str | None]:
        """Have all ranks that live say where they are, into `whereabouts`.

        Returns the states of their processes; None where the worker does not answer in time.
        """
        alive = [rank for rank in range(len(self.addresses)) if rank not in self.state.ended]
        self.whereabouts.clear()  # of a SIGUSR1 that somebody else has sent before
        addresses = [self.addresses[rank] for rank in alive]
        answers = ask_each(self.client, agent.ask_where, workers=addresses)
        deadline = time.monotonic() + WHEREABOUTS_TIMEOUT
        expected = set(alive)
        while expected - set(self.whereabouts) and time.monotonic() < deadline:
            self._take_next(SHORT_LOOK)
            suspended = {
                rank for rank in alive if answers.get(self.addresses[rank]) in hangs.SUSPENDED
            }
            expected = set(alive) - set(self.state.ended) - suspended
        return {rank: answers.get(self.addresses[rank]) for rank in alive}

    # Taking in what is heard

    def _take_next(self, timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._take(self.inbox.get(timeout=timeout))

    def _take_what_is_there(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self.inbox.get_nowait())

    def _take(self, event: Event) -> None:
        match event:
            case FromAgent():
                for message in unpack(event.packed):
                    self._take_message(event.rank, message)
            case WorkerLost():
                if event.address in self.addresses:
                    self.state.lose_worker(event.address)
                    self.directory.log(f"the worker at {event.address} was lost")
            case TaskEnded(status="error") if event.rank not in self.state.ended:
                error = self.futures[event.rank].exception()
                ended = Ended("raised", message=f"Its agent failed: {error!r}")
                self._take_message(event.rank, ended)
            case TaskEnded(status="cancelled"):
                # By somebody else, or by the client, which has lost the scheduler or is closed.
                # What we cancel in the end is heard of when the outcome is known.
                self.state.cancel(event.reason)

    def _take_message(self, rank: int, message: Message) -> None:
        self.state.take(rank, message, time.monotonic())
        if self.config is not None and shows_training(message):
            self._write_config()
        match message:
            case Started():
                self.directory.log(f"rank {rank} started: process {message.pid} on {message.host}")
            case Position():
                self.progress.position(message.known())
            case Report():
                self.directory.record(rank, message.values)
                self.progress.record(message.values, rank)
            case Line():
                self._take_line(rank, message.text)
            case File():
                self.directory.save(message.name, message.content())
            case CheckpointSaved():
                assert self.checkpoints is not None, "the attempt has begun"
                self.directory.saved()
                self.checkpoints.announced(self.addresses[rank], message.name, message.keep)
            case CheckpointFailed():
                self.directory.not_saved(message.why)
            case ParameterNorms():
                problem = self.replicas.take(rank, message)
                if problem is not None:
                    self.directory.problem(problem, "drifted apart")
            case Whereabouts():
                self.whereabouts[rank] = message
            case Ended():
                ended = self.state.ended[rank]
                if ended.how != "done":
                    self.directory.log(f"rank {rank} {outcome.in_log(ended)}")

    def _take_line(self, rank: int, text: str) -> None:
        """Write down a line that a rank has printed, and show rank 0's."""
        self.directory.log(f"[rank {rank}] {text}")
        if rank == 0:
            self.shown.add(text)
            self.progress.print(text)
        else:
            self.lines_not_shown += 1
            if WARNING.search(text):
                self.warnings.setdefault(text, rank)

    def _say_what_others_printed(self) -> None:
        """Show warnings that rank 0 has not had, and say where the lines of other ranks are."""
        for text, rank in self.warnings.items():
            if text not in self.shown:
                self.progress.print(f"[rank {rank}] {text}")
        if self.lines_not_shown:
            where = ""
            if not self.directory.is_temporary:
                where = f": see {shown(self.directory.path / 'log.txt')}"
            self.progress.note(f"Other ranks printed {self.lines_not_shown} line(s){where}")

    def tell_records(self) -> None:
        """Call `on_report` with the records that it has not had, in order.

        In the thread that called `launch`, between two looks at the ranks. What it raises is
        raised.
        """
        while self.on_report is not None and self.records_told < len(self.directory.records):
            record = self.directory.records[self.records_told]
            self.records_told += 1
            try:
                self.on_report(dict(record))  # it may change it
            except Exception as error:
                self.directory.log(f"on_report raised {error!r}: the ranks were ended")
                error.add_note(
                    "on_report raised this, and the ranks were ended. What was saved is in "
                    f"{self.directory.path}; launch with directory= to go on."
                )
                raise

    # The result

    def _result(self) -> Any:
        import torch  # not at the top: it takes a second, and only a result needs it

        pickled = self._wait_for(self.futures[0].result)
        try:
            # Our own ranks' pickle
            result = torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=False)
        except Exception as error:  # whatever the classes in it do when they are made again
            self.directory.log(
                f"all ranks finished; the result of rank 0 cannot be loaded here: {error!r}"
            )
            raise outcome.unreadable_result(error, self.directory.path) from None
        seconds = time.monotonic() - self.began
        self.directory.log(f"finished: {len(self.addresses)} rank(s), {seconds:.1f} s")
        return result

    # Ending

    def _end(self) -> None:
        """Have the ranks gone and the last checkpoints here.

        It raises nothing but what a person does: how the run ended is known already.
        """
        # Asked before we cancel tasks ourselves, which looks like a loss.
        connected = not self.state.is_cancelled and self.client.status == "running"
        try:
            if connected:
                self._end_ranks()
                self._finish_fetching()
        except (OSError, CancelledError, Error) as error:
            self.directory.problem(f"After the run had ended: {error}", "end")
        finally:
            # Let go of all tasks, and so of their results: one that hands over tables may still
            # wait for a worker that is gone.
            for future in filter(None, [*self.futures, *self.handed]):
                future.release()
            self.progress.close()
            self._say_what_others_printed()

    def _end_ranks(self) -> None:
        """Cancel what still runs and wait until every rank says that it is gone."""
        running = [future for future in self.futures if not future.done()]
        if running:
            self.client.cancel(running, force=True)
        began = time.monotonic()
        while time.monotonic() < began + GONE_TIMEOUT:
            pending = set(range(len(self.futures))) - set(self.state.ended)
            if not pending:
                return
            none_has_started = not pending & set(self.state.hosts)
            if none_has_started and time.monotonic() > began + UNSTARTED_TIMEOUT:
                return
            self._take_next(SHORT_LOOK)

    def _finish_fetching(self) -> None:
        """Get the last checkpoints of workers that do not see the run directory.

        They may still be on their way.
        """
        if self.checkpoints is None:
            return
        lost = {rank for rank, end in self.state.ended.items() if end.how == "lost"}
        lost |= self.state.lost_late
        problem = self.checkpoints.close({self.addresses[rank] for rank in lost})
        if problem:
            self.directory.problem(
                f"The newest checkpoint could not be fetched: {problem}", "fetch"
            )
