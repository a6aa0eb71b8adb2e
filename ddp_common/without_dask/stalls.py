"""Ranks of torchrun or srun that wait for each other: they say where and who is to blame, and end.

Nobody watches these ranks from outside, so a thread in each of them does. The first that finds no
progress asks all through the run's store, where each answers with its stack and its collectives,
and says the verdict. Then all end with exit code 1, and whoever has started them may start them
again. A rank that answers nothing is to blame. Promises: no rank ends that makes progress, unless
a peer has waited for it for the whole time-out.
"""

import contextlib
import datetime
import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass

import torch.distributed as dist

from ddp_common.hangs.blame import Standstill, blame, where_all_are
from ddp_common.messages import PROGRESS, Collective, File, Message
from ddp_common.ranks import recorder, rendezvous, reporting
from ddp_common.ranks.store import Store
from ddp_common.run.run_directory import RunDirectory

LOOK_INTERVAL = 0.5  # seconds
LONGEST_LOOK = 2.0  # seconds between two looks; after more the process was suspended
ANSWER_TIMEOUT = datetime.timedelta(seconds=5)  # for a rank to say where it is
MEETING_TIMEOUT = 4 * ANSWER_TIMEOUT.total_seconds()  # seconds
EXIT_CODE = 1
SELF = "ddp_common/without_dask/"  # of a stack: from here on, what has called the function


@dataclass
class Answer:
    """What a rank says of itself when somebody has found that nothing goes on."""

    host: str
    idle: float  # seconds without progress
    step: int
    has_returned: bool
    stack: str
    collectives: list[dict] | None


class Watch:
    """The thread of this rank, from `start` to `end`."""

    def __init__(self, prefix: str, timeout: float, run_directory: RunDirectory | None):
        """Keys in the store begin with `prefix`; `run_directory` is rank 0's."""
        self.prefix = prefix
        self.timeout = timeout
        self.run_directory = run_directory
        self.has_returned = False
        self.asked = threading.Event()  # somebody has found that nothing goes on
        self.over = threading.Event()
        self.moved = time.monotonic()
        self.looked = self.moved
        self.goes_on = False  # this rank has moved before anybody was asked
        self.was_said = False  # the verdict, by this rank
        self.meets = False  # the ranks tell each other where they are, or rank 0 is silent

    def start(self) -> None:
        """Begin to watch; alone, and without a time-out, there is nothing to watch."""
        if rendezvous.world_size() == 1 or rendezvous.current_store() is None or not self.timeout:
            return
        self.store.call_when_set(self._key("found"), self.asked.set)
        threading.Thread(target=self._watch, daemon=True, name="ddp-stalls").start()

    def hear(self, message: Message) -> None:
        """Take note of what this rank reports: some of it shows that it makes progress."""
        if isinstance(message, (*PROGRESS, File)):
            self.moved = time.monotonic()

    def returned(self) -> None:
        """The training function has returned: this rank waits rightly from now on."""
        self.has_returned = True

    def end(self) -> None:
        """Watch no more. Where the ranks are just finding out which one stalls, wait for that.

        It says more than the error that this rank has got because a peer has left already, and
        the process ends with it.
        """
        deadline = time.monotonic() + MEETING_TIMEOUT
        while (self.asked.is_set() or self.meets) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.over.set()

    @property
    def store(self) -> Store:
        store = rendezvous.current_store()
        assert store is not None, "there are several ranks"
        return store

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def _watch(self) -> None:
        while not self.over.is_set():
            is_asked = self.asked.wait(LOOK_INTERVAL)
            if self.over.is_set():
                return
            self._leave_out_time_asleep()
            if (is_asked or self._is_stuck()) and self._meet():
                os._exit(EXIT_CODE)  # the main thread waits in C++, where nothing else reaches it

    def _leave_out_time_asleep(self) -> None:
        """A process that was suspended, as by `scontrol suspend`, did not wait meanwhile."""
        now = time.monotonic()
        asleep = now - self.looked
        if asleep > LONGEST_LOOK:
            self.moved += asleep
        self.looked = now

    def _is_stuck(self) -> bool:
        if self.has_returned or self._idle() <= self.timeout:
            return False
        latest = recorder.known()
        if latest and latest[-1]["seconds_ago"] < self.timeout:
            # A loop of which nothing is known but that its collectives go on.
            self.moved = time.monotonic() - latest[-1]["seconds_ago"]
            return False
        return True

    def _idle(self) -> float:
        return time.monotonic() - self.moved

    def _meet(self) -> bool:
        """Answer, and hear the verdict or find it. False if there was nothing to meet for.

        Whatever rank 0's process is in, which holds the store, this ends in time.
        """
        self.goes_on = self.was_said = False
        self.meets = True
        meeting = threading.Thread(target=self._answer, daemon=True)
        meeting.start()
        meeting.join(MEETING_TIMEOUT)
        if meeting.is_alive() and not self.was_said:
            _say(
                f"Rank {rendezvous.rank()} stalled: no progress for {self.timeout:g} s, and rank "
                "0, which holds the store of the run, does not answer: its process is stopped, or "
                f"its host is gone. Where rank {rendezvous.rank()} is:\n{_stack()}"
            )
        self.meets = not self.goes_on
        return not self.goes_on

    def _answer(self) -> None:
        rank = rendezvous.rank()
        with contextlib.suppress(dist.DistError):  # rank 0 has ended: torchrun ends the others
            finders = self.store.add(self._key("finders"), 1)
            if not self.asked.is_set() and not self._is_stuck():  # it has moved meanwhile
                self.store.add(self._key("finders"), -1)
                self.goes_on = True
                return
            if finders > 1 and not self.asked.wait(ANSWER_TIMEOUT.total_seconds()):
                self.store.add(self._key("finders"), -1)  # who was to find it has moved meanwhile
                self.goes_on = True
                return
            self.store.set(self._key(f"answer/{rank}"), json.dumps(asdict(self._where())))
            if finders == 1:
                self.store.set(self._key("found"), "")
                verdict = self._verdict()
                _say(verdict)
                self.was_said = True
                self.store.set(self._key("verdict"), verdict)
            if self.run_directory is not None:
                (verdict,) = self.store.multi_get([self._key("verdict")], 2 * ANSWER_TIMEOUT)
                self.run_directory.log(verdict.decode())
                self.store.set(self._key("logged"), "")
            with contextlib.suppress(OSError, ValueError):  # what the user's program has printed
                sys.stdout.flush()
            self.store.wait([self._key("logged")], 2 * ANSWER_TIMEOUT)

    def _where(self) -> Answer:
        return Answer(
            host=socket.gethostname(),
            idle=self._idle(),
            step=reporting.position().get("step", 0),
            has_returned=self.has_returned,
            stack=_stack(),
            collectives=recorder.known(),
        )

    def _verdict(self) -> str:
        answers = self._answers()
        world = rendezvous.world_size()
        silent = [rank for rank in range(world) if rank not in answers]
        returned = {rank: each.step for rank, each in answers.items() if each.has_returned}
        # One that still makes progress may be the one for which the others wait.
        stuck = [rank for rank, each in answers.items() if not each.has_returned]
        stacks = {rank: each.stack for rank, each in answers.items()}
        records = {
            rank: [Collective(**fields) for fields in each.collectives]
            for rank, each in answers.items()
            if each.collectives is not None
        }
        rank, why = blame(
            Standstill(
                places=["process"] * world,
                stuck=sorted(silent + stuck),
                steps={rank: each.step for rank, each in answers.items()},
                moved={rank: -each.idle for rank, each in answers.items()},
                returned=returned,
                states={each: None if each in silent else "running" for each in range(world)},
                stacks={each: stacks.get(each, "") for each in range(world)},
                records=records,
            )
        )
        _, details = where_all_are(records, stacks)
        where = f" on {answers[rank].host}" if rank in answers else ""
        return (
            f"Rank {rank} of {world}{where} stalled: no progress for {self.timeout:g} s. {why}\n\n"
            f"{details}"
        )

    def _answers(self) -> dict[int, Answer]:
        """Of all ranks that say something in time."""
        deadline = time.monotonic() + ANSWER_TIMEOUT.total_seconds()
        answers: dict[int, Answer] = {}
        while len(answers) < rendezvous.world_size() and time.monotonic() < deadline:
            for rank in range(rendezvous.world_size()):
                key = self._key(f"answer/{rank}")
                if rank not in answers and self.store.check([key]):
                    answers[rank] = Answer(**json.loads(self.store.get(key)))
            time.sleep(0.05)
        return answers


def _stack() -> str:
    """Where the main thread is, innermost call first, without what has called the function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = []
    while frame is not None and SELF not in frame.f_code.co_filename:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_qualname}')
        frame = frame.f_back
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
