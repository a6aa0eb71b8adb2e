"""One set of ranks from start to end, as the client sees it: start them, follow what they say, find out which failed first and why.

Relies on the agents' messages and on the scheduler's word on lost workers. Promises: the first failure ends the attempt, with the rank
that failed by itself as the headline, not the peer that noticed; a rank that does not get on is found; afterwards the ranks are gone.
"""

import contextlib
import io
import logging
import os
import queue
import re
import signal
import threading
import time

from distributed import CancelledError
from distributed.comm import get_address_host

from ddp_common.client.checkpoints import Checkpoints
from ddp_common.errors import Error, RankFailed, RankStalled, RunStopped, SchedulerLost
from ddp_common.ranks.checkpoint_files import step_of
from ddp_common.ranks.process import training_stack, unpickle_exception
from ddp_common.run.config import describe, has_begun, may_be_written
from ddp_common.run.progress import Progress
from ddp_common.worker import agent
from ddp_common.worker.result import LARGE_RESULT
from ddp_common.worker.sender import messages_of
from ddp_common.worker.spool import take_file

GONE_TIMEOUT = 5  # seconds to wait for ranks to be gone once they were told
CAUSE_TIMEOUT = 1  # seconds to wait for the cause when a consequence was reported first
STACKS_TIMEOUT = 3  # seconds that workers have to say where their ranks are
LOOK_INTERVAL = 0.5  # seconds
FETCH_LOOK = 0.05  # seconds between two looks at what else happens while the result is on its way
LARGE = 2**20  # bytes of function and arguments
KEPT_LINES = 50  # of each rank's output, for the error message
CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe|remote process exited|ncclRemoteError"
    r"|Failed to recv|Socket closed|failed to connect"
)
COLLECTIVE = re.compile(r"_engine_run_backward|torch/distributed/|torch/nn/parallel/distributed")
stop_requested = False  # set by a program that was told to stop, such as `make run` in a batch job: the ranks shall save and leave
interrupted = False  # set by its handler of Ctrl-C: an exception is lost if that moment lies in a callback of an import or of the collector
PROGRESS = {
    "report",
    "position",
    "token",
    "checkpoint",
    "started",
    "returned",
}  # messages that show that a rank gets on


class Attempt:
    """State: which ranks have ended and how, when each was last seen to get on, and the last lines of each."""

    running = 0  # attempts that are going on in this program

    def __init__(self, client, run_id, addresses, inbox, directory, stall_timeout):
        self.client, self.run_id, self.addresses, self.inbox, self.directory = (
            client,
            run_id,
            addresses,
            inbox,
            directory,
        )
        self.stall_timeout = stall_timeout
        self.futures, self.ended, self.hosts, self.returned, self.moved, self.at = (
            [],
            {},
            {},
            {},
            {},
            {},
        )
        self.lines = {rank: [] for rank in range(len(addresses))}
        self.scheduler_lost, self.looked, self.all_started = False, time.monotonic(), 0.0
        self.lost_late, self.cancelled_by = (
            set(),
            None,
        )  # ranks whose workers died after they had ended; why Dask cancelled the tasks
        self.checkpoints, self.progress, self.began = None, Progress(), time.monotonic()
        self.config = (
            None  # what is to be written into config.json; of a resumed run once it has begun
        )

    def run(self, payload, previous=None, number=1):
        """Start the ranks, follow them, and have them gone; returns rank 0's result. `previous` is the failure that this is a restart for."""
        Attempt.running += 1
        try:
            self._start(payload, previous, number)
            return self._follow()
        except (
            OSError,
            CancelledError,
        ):  # Dask says so when a worker or the scheduler cannot be reached
            if (failure := self._failure_at_start()) is None:
                raise
            raise failure from None
        finally:
            try:
                self._end()
            finally:
                Attempt.running -= 1

    def _start(self, payload, previous, number):
        """Describe the attempt, settle where checkpoints are, open the store's socket on rank 0's worker, submit one pinned task per rank."""
        with contextlib.suppress(OSError):  # it says so itself
            self.directory.check()
        self.config = describe(
            self.addresses, self.directory.path, getattr(self.directory, "function", None)
        )
        if may_be_written(self.config, self.directory.path):
            self._write_config()
        hosts = [get_address_host(address) for address in self.addresses]
        self.checkpoints = Checkpoints(
            self.client, self.run_id, self.directory.path / "checkpoints", self.addresses
        )
        if previous is not None:
            self._note_restart(previous, number)
        (store,) = self.client.run(agent.listen, self.run_id, workers=self.addresses[:1]).values()
        if (
            len(payload) > LARGE
        ):  # to one worker, from which the others take it: a task's own arguments go through the scheduler
            payload = self.client.scatter(payload, workers=self.addresses[:1], hash=False)
        for rank, (address, host) in enumerate(zip(self.addresses, hosts)):
            spec = {
                "run": self.run_id,
                "rank": rank,
                "world_size": len(hosts),
                "store": store,
                "local_rank": hosts[:rank].count(host),
                "local_world_size": hosts.count(host),
                "environment": {"DDP_CHECKPOINTS": self.checkpoints.place[address][0]},
            }
            self.futures.append(
                self.client.submit(
                    agent.run_rank,
                    spec,
                    payload,
                    workers=[address],
                    pure=False,
                    retries=0,
                    key=f"ddp-rank-{self.run_id}-{rank}",
                    priority=10,
                )
            )
            self.futures[-1].add_done_callback(
                lambda done, rank=rank: self.inbox.put(
                    {"future": rank, "status": done.status, "reason": _why_cancelled(done)}
                )
            )

    def _write_config(self):
        self.directory.write_json("config.json", self.config)
        self.config = None

    def _failure_at_start(self):
        """What became of a worker, or the scheduler, that was asked and did not answer; None if both are there."""
        began = time.monotonic()
        while (
            not self._failed()
            and self.client.status == "running"
            and time.monotonic() < began + CAUSE_TIMEOUT
        ):
            with contextlib.suppress(queue.Empty):
                self._take(self.inbox.get(timeout=0.02))
        if failed := self._failed():
            return self._failure(min(failed))
        if self.scheduler_lost:
            return self._lost_scheduler()
        return self._lost_scheduler() if self.client.status != "running" else None

    def _note_restart(self, previous, number):
        reason, resumed = str(previous).splitlines()[0], self.checkpoints.resumed
        step = step_of(resumed) if resumed is not None else 0
        self.directory.record(
            getattr(previous, "rank", 0),
            {
                "time": time.time(),
                "event": "restart",
                "attempt": number,
                "reason": reason,
                "step": step,
                "ranks": len(self.addresses),
            },
        )
        text = f"Restart {number - 1} on {len(self.addresses)} rank(s) from step {step}. Why: {reason}"
        self.directory.log(text)
        self.progress.note(text)

    def _follow(self):
        """Take in messages until every rank is done; returns rank 0's result. Raises at the first failure."""
        import torch

        while len(self.ended) < len(self.addresses) and not self._left_alone():
            with contextlib.suppress(queue.Empty):
                self._take(self.inbox.get(timeout=LOOK_INTERVAL))
            if time.monotonic() - self.looked > LOOK_INTERVAL and self.inbox.empty():
                self._look_around()
            if failed := self._failed():
                rank = self._first_cause(failed)
                if not self._is_consequence(rank) or not self._stopped():
                    raise self._failure(rank)
            if self.scheduler_lost:
                raise self._lost_scheduler()
        if self._stopped():
            raise self._stop()
        pickled = self._result_file()
        try:
            result = torch.load(
                pickled, map_location="cpu", weights_only=False
            )  # our own ranks' pickle
        except Exception as error:  # whatever the classes in it do when they are made again
            raise self._unreadable_result(error) from None
        self.directory.log(
            f"finished: {len(self.addresses)} rank(s), {time.monotonic() - self.began:.1f} s"
        )
        return result

    def _result_file(self):
        """Rank 0's pickled result, to be read: from the worker's memory if that is on this machine, else through Dask."""
        place = self.ended[0]["result"]
        if place["size"] > LARGE_RESULT:
            self.directory.log(f"fetching the result of rank 0: {place['size'] / 2**20:,.0f} MiB")
            self.progress.note(f"Fetching the result of rank 0: {place['size'] / 2**20:,.0f} MiB.")
        with contextlib.suppress(OSError):  # not on this machine, or not ours to read
            file = open(place["path"], "rb")  # once it is open it stays, also if the worker dies
            if os.readlink(f"/proc/self/fd/{file.fileno()}") == place["target"]:
                return file
            file.close()
        return io.BytesIO(self._fetch_result())

    def _fetch_result(self):
        """What rank 0 returned, as bytes. Its worker may die while it is on its way; Dask would then wait for that worker for ever."""
        fetched = queue.SimpleQueue()

        def fetch():
            try:
                fetched.put((self.futures[0].result(), None))
            except BaseException as error:  # raised again below, in the thread of the caller
                fetched.put((None, error))

        threading.Thread(target=fetch, daemon=True, name="ddp-result").start()
        while True:
            with contextlib.suppress(queue.Empty):
                pickled, error = fetched.get(timeout=FETCH_LOOK)
                if error is None:
                    return pickled
                if isinstance(error, CancelledError):
                    break
                raise error
            self._take_what_is_there()
            self._look_around()
            if 0 in self.lost_late or self.scheduler_lost:
                break
        self._take_what_is_there()
        if 0 in self.lost_late:
            self.ended[0] = {"how": "lost"}
            raise self._failure(0)
        raise self._lost_scheduler()

    def _take_what_is_there(self):
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self.inbox.get_nowait())

    def _unreadable_result(self, error):
        self.directory.log(
            f"all ranks finished; the result of rank 0 cannot be loaded here: {error!r}"
        )
        failure = Error(
            f"All ranks finished, but what rank 0 returned cannot be loaded in this process: {type(error).__name__}: {error}. "
            "A class in it must be importable here too; tensors, numbers, a state_dict, lists and dicts of these always are. "
            f"What was saved is in {self.directory.path}."
        )
        failure.directory = self.directory.path
        return failure

    def _look_around(self):
        """What no message tells: that this program shall stop, and that a rank has not got on."""
        self.looked = time.monotonic()
        if interrupted:
            raise KeyboardInterrupt
        if stop_requested:
            self.directory.say_ending()
        if (
            stop_requested and self.moved and not self._stopped()
        ):  # said again until it is heard: a rank may not listen yet
            self.client.run(agent.tell_to_stop, workers=self.addresses[:1], on_error="ignore")
        if stalled := self._stalled():
            raise self._stall(stalled)

    def _failed(self):
        return [rank for rank, how in self.ended.items() if how["how"] not in ("done", "stopped")]

    def _stopped(self):
        return [rank for rank, how in self.ended.items() if how["how"] == "stopped"]

    def _left_alone(
        self,
    ):  # before the first step; the others may wait for them where no signal is heard
        return [rank for rank in self._stopped() if not self.ended[rank]["in_loop"]]

    def _is_consequence(self, rank):
        return bool(CONSEQUENCE.search(self.ended[rank].get("message", "")))

    def _first_cause(self, failed):
        """The rank that failed by itself: peers that lost their connection to it may be heard of before it."""
        began = time.monotonic()
        while (
            all(map(self._is_consequence, failed))
            and not self._stopped()
            and time.monotonic() < began + (CAUSE_TIMEOUT / 5 if self.returned else CAUSE_TIMEOUT)
        ):
            with contextlib.suppress(queue.Empty):
                self._take(self.inbox.get(timeout=0.02))
            failed = self._failed()
        return min(failed, key=self._is_consequence)

    def _take(self, event):
        if event.get("lost") in self.addresses:
            rank = self.addresses.index(event["lost"])
            self.lost_late.update({rank} & set(self.ended))  # it had ended before
            self.ended.setdefault(rank, {"how": "lost"})
        if event.get("status") == "error" and event["future"] not in self.ended:
            error = self.futures[event["future"]].exception()
            self.ended[event["future"]] = {
                "how": "raised",
                "message": f"Its agent failed: {error!r}",
                "traceback": "",
            }
        if (
            event.get("status") == "cancelled"
        ):  # not by us: a client cancels its futures when it loses the scheduler or is closed
            self.scheduler_lost, self.cancelled_by = True, event.get("reason")
        for message in messages_of(event):
            self._take_message(event["rank"], message)

    def _take_message(self, rank, message):
        if PROGRESS & set(message):
            self.moved[rank] = time.monotonic()
        if self.config is not None and has_begun(message):
            self._write_config()
        if "report" in message:
            self.directory.record(rank, message["report"])
            self.progress.record(message["report"])
        elif "position" in message:
            self.at[rank] = message["position"]
            self.progress.position(message["position"])
        elif "line" in message:
            self.lines[rank] = [*self.lines[rank], message["line"]][-KEPT_LINES:]
            self.directory.log(f"[rank {rank}] {message['line']}")
        elif "token" in message:
            self._take_file(rank, message)
        elif "problem" in message:
            self.directory.not_saved(message["problem"])
        elif "checkpoint" in message:
            self.directory.saved()
            self.checkpoints.announced(
                self.addresses[rank], message["checkpoint"], message["keep"]
            )
        elif "returned" in message:
            self.returned[rank] = self.at[rank] = message["returned"]
        elif "started" in message:
            self.hosts[rank], self.all_started = message["started"]["host"], time.monotonic()
            self.directory.log(
                f"rank {rank} started: process {message['started']['pid']} on {message['started']['host']}"
            )
        elif "ended" in message:
            if message["ended"] == {
                "how": "exited",
                "exitcode": -signal.SIGTERM,
            }:  # told before it listened
                message["ended"] = {"how": "stopped", "told": True, "in_loop": False}
            self.ended.setdefault(rank, message["ended"])
            if message["ended"]["how"] not in ("done", "cancelled"):
                self.directory.log(f"rank {rank} {_in_words(message['ended'])}")

    def _take_file(self, rank, message):
        answers = self.client.run(
            take_file, message["token"], workers=[self.addresses[rank]], on_error="ignore"
        )
        if not answers:  # its worker has died
            self.directory.problem(
                f"The file {message['file']} of rank {rank} was lost with its worker.",
                f"lost {message['file']}",
            )
        for content in answers.values():
            self.directory.save(message["file"], content)

    def _failure(self, rank):
        if (
            self.returned
            and self._is_consequence(rank)
            and COLLECTIVE.search(self.ended[rank].get("traceback", ""))
        ):
            return self._returned_early(rank)
        how, code = self.ended[rank], self.ended[rank].get("exitcode")
        killed_by = signal.Signals(-code).name if code is not None and code < 0 else None
        if how["how"] in ("lost", "cancelled"):
            cause = (
                "its worker died or cannot be reached"
                if how["how"] == "lost"
                else "its worker was closed"
            )
        elif how["how"] == "raised":
            cause = how["message"]
        elif killed_by:
            cause = f"killed by {killed_by}" + (
                ", often because memory ran out" if killed_by == "SIGKILL" else ""
            )
        else:
            cause = f"it left with exit code {code} before its function returned"
        if consequences := [
            str(peer) for peer in sorted(self._failed()) if peer != rank
        ]:  # on a line of its own: how many are heard of in time differs
            cause += (
                f"\nAs a consequence, rank {', '.join(consequences)} lost the connection to it."
            )
        if self.at.get(rank, {}).get("step"):
            cause += f"\nIts last known step is {self.at[rank]['step']}."
        failure = self._describe(
            RankFailed,
            rank,
            f"failed: {cause}",
            how.get("traceback", ""),
            exitcode=code,
            signal=killed_by,
            traceback=how.get("traceback", ""),
        )
        failure.__cause__ = unpickle_exception(how["exception"]) if how.get("exception") else None
        return failure

    def _returned_early(self, waiting):
        rank = min(self.returned)
        return self._describe(
            RankFailed,
            rank,
            f"failed: its function returned at step {self.returned[rank].get('step', 0)}, while rank "
            f"{waiting} went on and lost the connection to it. Every rank must run the same number of steps.",
            f"Where rank {waiting} was:\n{self.ended[waiting]['traceback']}",
        )

    def _describe(self, kind, rank, what, details, **attributes):
        said = "".join(
            f"\n  [rank {r}] {line}" for r, lines in self.lines.items() for line in lines
        )
        parts = [
            f"Rank {rank} of {len(self.addresses)} on {(host := self.hosts.get(rank, self.addresses[rank]))} {what}",
            details.strip(),
            said and f"Last lines of the ranks:{said}",
            f"The whole log: {self.directory.path / 'log.txt'}",
        ]
        return kind(
            "\n\n".join(filter(None, parts)),
            rank=rank,
            host=host,
            logs=self.lines,
            directory=self.directory.path,
            **attributes,
        )

    def _stalled(self):
        """Ranks that live, have work to do, and have not got on for too long. While one is yet to start, the others rightly wait."""
        latest = time.monotonic() - (self.stall_timeout or float("inf"))
        if len(self.hosts) < len(self.addresses) or self.all_started > latest:
            return []
        return [
            rank
            for rank, moved in self.moved.items()
            if moved < latest and rank not in self.ended and rank not in self.returned
        ]

    def _stall(self, stalled):
        alive, answers = (
            {
                rank: address
                for rank, address in enumerate(self.addresses)
                if rank not in self.ended
            },
            {},
        )
        asking = threading.Thread(
            daemon=True,
            target=lambda: answers.update(  # a thread, because a worker may not answer at all
                self.client.run(agent.where_is_it, workers=list(alive.values()), on_error="ignore")
            ),
        )
        asking.start()
        asking.join(STACKS_TIMEOUT)
        found = {rank: answers.get(address) for rank, address in alive.items()}
        stacks = {
            rank: training_stack(answer[1]) if answer else "(no answer from its worker)"
            for rank, answer in found.items()
        }
        rank, why = self._who_is_to_blame(stalled, found, stacks)
        details = "Where each rank is, innermost call first:\n" + "\n".join(
            f"[rank {r}]\n{stack}" for r, stack in stacks.items()
        )
        self.directory.log(f"rank {rank} stalled: {why}\n{details}")
        return self._describe(
            RankStalled,
            rank,
            f"stalled: no progress for {self.stall_timeout:g} s. {why}",
            details,
            stacks=stacks,
        )

    def _who_is_to_blame(self, stalled, found, stacks):
        """(rank, a sentence). Who is stopped or gone keeps the others waiting; then who is not where the others wait; then who is behind."""
        others = "the others wait for it" if len(self.addresses) > 1 else "nothing goes on"
        steps = {rank: self.at.get(rank, {}).get("step", 0) for rank in stalled}
        for rank in stalled:
            if found[rank] is None:
                return rank, f"Its worker at {self.addresses[rank]} does not answer; {others}."
            if found[rank][0] in ("stopped", "tracing-stop"):
                return rank, f"Its process is stopped (SIGSTOP, or a debugger); {others}."
        elsewhere = [
            rank
            for rank in stalled
            if not COLLECTIVE.search("\n".join(stacks[rank].splitlines()[:6]))
        ]
        if self.returned and not elsewhere:
            rank = min(self.returned)
            return rank, (
                f"Its function returned at step {self.returned[rank].get('step', 0)}, while rank {', '.join(map(str, stalled))} went on and waits for it. "
                "Every rank must run the same number of steps."
            )
        if elsewhere and len(elsewhere) < len(self.addresses):
            return elsewhere[
                0
            ], f"It is not in a collective at step {steps[elsewhere[0]]}; {others} there."
        rank = min(stalled, key=lambda rank: (steps[rank], self.moved[rank]))
        return rank, f"It is at step {steps[rank]}; " + (
            f"{others}." if steps[rank] < max(steps.values()) else "all ranks wait."
        )

    def _stop(self):
        told = (
            sorted(rank for rank in self._stopped() if self.ended[rank].get("told"))
            or self._stopped()
        )
        step = max(self.ended[rank].get("step", 0) for rank in self._stopped())
        self.directory.log(f"stopped after step {step}: rank {told} was told to")
        saved = self.checkpoints.newest()
        left = (
            (
                f"after step {step}; "
                + (f"the newest checkpoint is {saved.name}" if saved else "there is no checkpoint")
            )
            if step
            else "before the first step"
        )
        return RunStopped(
            f"The run was told to stop: rank {', '.join(map(str, told))} on {self.hosts[told[0]]} got SIGTERM. "
            f"All ranks left {left}.",
            step=step,
            directory=self.directory.path,
        )

    def _lost_scheduler(self):
        if self.client.status == "running" and self.cancelled_by != "scheduler-connection-lost":
            return self._cancelled_from_outside()
        self.directory.log("the connection to the scheduler was lost")
        logging.getLogger("distributed.client").setLevel(
            logging.CRITICAL
        )  # it would print how its attempts to reconnect end
        return SchedulerLost(
            f"The connection to Dask's scheduler at {getattr(self.client.scheduler, 'address', '?')} was lost or closed. The ranks end by themselves. "
            f"What was saved is in {self.directory.path}; connect again and launch with directory= to go on.",
            directory=self.directory.path,
        )

    def _cancelled_from_outside(self):
        restarted = self.cancelled_by == "scheduler-restart"
        what = (
            "The cluster was restarted (client.restart)"
            if restarted
            else "The tasks of the ranks were cancelled from outside (client.cancel)"
        )
        self.directory.log(f"{what}; the ranks end")
        error = Error(
            f"{what} while this launch was running, which ended its ranks. What was saved is in {self.directory.path}; "
            "launch with directory= to go on. To end a launch, interrupt it."
        )
        error.directory = self.directory.path
        return error

    def _end(self):
        """Have the ranks gone and the last checkpoints here. It raises nothing but what a person does: how the run ended is known."""
        connected = (
            not self.scheduler_lost and self.client.status == "running"
        )  # asked before our own cancelling, which looks like a loss
        try:
            self._end_ranks(connected)
            if connected and self.checkpoints is not None:
                self._end_fetching()
        except (OSError, CancelledError, Error) as error:
            self.directory.problem(f"After the run had ended: {error}", "end")
        finally:
            self.progress.close()

    def _end_ranks(self, connected):
        """Cancel what still runs and wait until every rank says that it is gone."""
        running = [future for future in self.futures if not future.done()]
        if running and connected:
            self.client.cancel(running, force=True)
        told = time.monotonic()
        while (
            connected
            and time.monotonic() < told + GONE_TIMEOUT
            and (pending := set(range(len(self.futures))) - set(self.ended))
        ):
            if time.monotonic() > told + 1 and not pending & set(
                self.hosts
            ):  # a rank that never started says nothing
                break
            with contextlib.suppress(queue.Empty):
                self._take(self.inbox.get(timeout=0.1))

    def _end_fetching(self):
        lost = {self.addresses[rank] for rank, how in self.ended.items() if how["how"] == "lost"}
        if problem := self.checkpoints.close(lost | self._lost_late()):
            self.directory.problem(
                f"The newest checkpoint could not be fetched: {problem}", "fetch"
            )

    def _lost_late(self):
        return {self.addresses[rank] for rank in self.lost_late}


def _why_cancelled(future):
    """The word of Dask's for why a task was cancelled; None if it was not."""
    if future.status != "cancelled":
        return None
    return getattr(future._state.exception, "reason", None)


def _in_words(ending):
    """How a rank ended, as a line of the log; with a traceback, lines."""
    how, code = ending["how"], ending.get("exitcode")
    if how == "raised":
        return f"failed: {ending.get('message', '')}\n{ending.get('traceback', '')}".rstrip()
    if how == "stopped":
        return f"left after step {ending.get('step', 0)}" + (
            ": it got SIGTERM" if ending.get("told") else ", as the others did"
        )
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"left with exit code {code} before its function returned"
