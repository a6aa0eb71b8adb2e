"""Record a few training steps of a rank with torch's profiler, for `Run.timeline` to draw.

Each rank records its own steps, without a collective, and sends what it has recorded to the run
directory. A step ends with the step of an optimizer. Promises: training goes on whatever becomes
of the recording.
"""

import gzip
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile

from ddp_common.messages import ATTEMPT, HOST, LEAD, RECORDINGS, STEPS
from ddp_common.ranks import rendezvous, reporting
from ddp_common.values import whole_number

_recording: "Recording | None" = None  # of this rank, until it has been sent


def trace(steps: int = 5, skip: int = 2) -> None:
    """Record the next steps of this rank: after `skip` of them, `steps` are recorded.

    Call it in the training function, on every rank, where the steps of interest begin; the first
    steps of a run are slower than others. `Run.timeline()` draws them. Recording takes some tens
    of microseconds for each operation, so times are a little longer than without. A second call
    begins anew. Raises `Error` for numbers that are none.
    """
    global _recording
    steps = whole_number("trace(steps=…)", steps, least=1)
    skip = whole_number("trace(skip=…)", skip, least=0)
    end()
    _recording = Recording(steps, skip)


def trace_if_asked() -> None:
    """Begin at once if DDP_TRACE in the environment is a number of steps. Raises `Error` else."""
    wanted = os.environ.get("DDP_TRACE")
    if wanted and wanted != "0":
        trace(steps=whole_number("TRACE", wanted, least=1))


def finish() -> None:
    """The training function has returned: send what has been recorded so far."""
    if _recording is not None and not _recording.is_over:
        _recording.finish()


def end() -> None:
    """However the training function has ended: nothing records any more."""
    global _recording
    if _recording is not None:
        _recording.give_up()
        _recording.remove_hooks()
    _recording = None


class Recording:
    """One recording, from the call of `trace` until its file is sent."""

    def __init__(self, steps: int, skip: int):
        self.steps = steps
        # The profiler starts a step early: its own start, which takes some ranks longer than
        # others, is in that one, and not in those that are drawn.
        self.lead = min(1, skip)
        self.to_skip = skip - self.lead
        self.done = -self.lead  # steps that are recorded
        self.is_over = False
        self.profile: profile | None = None  # while it records
        # The profiler is stopped before the step after the last one, and not in the end of the
        # last one, which would be cut off.
        self.hooks = [
            register_optimizer_step_post_hook(self._after_step),
            register_optimizer_step_pre_hook(self._before_step),
        ]
        if self.to_skip == 0:
            self._start()

    def _after_step(self, *_: object) -> None:
        if self.is_over:
            return
        if self.profile is not None:
            self.done += 1
        elif self.to_skip > 0:
            self.to_skip -= 1
            if self.to_skip == 0:
                self._start()

    def _before_step(self, *_: object) -> None:
        if self.profile is not None and self.done == self.steps:
            self.finish()

    def _start(self) -> None:
        if torch.autograd._profiler_enabled():  # torch can have one at a time
            _say("not recorded: another profiler is at work in this rank")
            self.give_up()
            return
        activities = [ProfilerActivity.CPU]
        if rendezvous.device().type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(activities=activities)
        try:
            self.profile.start()
        except Exception as error:  # a profiler is torch's and the driver's, and training is not
            self.profile = None
            self.give_up()
            _say(f"not recorded: {error}")

    def finish(self) -> None:
        """Stop recording, and send the file."""
        recorded, self.profile = self.profile, None
        self.is_over = True
        if recorded is None or self.done < 1:
            _say("not recorded: training was over before the first step that was wanted")
            if recorded is not None:
                recorded.stop()
            return
        if self.done < self.steps:
            _say(f"{self.done} of {self.steps} steps recorded: training was over then")
        try:
            # The step that is about to begin, or the function's end, is not one of them.
            recorded.add_metadata_json(STEPS, str(self.done))
            recorded.add_metadata_json(LEAD, str(self.lead))
            recorded.add_metadata_json(HOST, json.dumps(socket.gethostname()))
            recorded.add_metadata_json(ATTEMPT, json.dumps(os.environ.get("MASTER_PORT", "")))
            recorded.stop()
            with tempfile.TemporaryDirectory(prefix="ddp-trace-") as folder:
                path = Path(folder) / "trace.json"
                recorded.export_chrome_trace(str(path))
                content = gzip.compress(path.read_bytes(), compresslevel=3)
        except (OSError, RuntimeError) as error:  # such as a full disk
            _say(f"the recording could not be written: {error}")
            return
        reporting.save_file(f"{RECORDINGS}/rank-{rendezvous.rank()}.json.gz", content)

    def give_up(self) -> None:
        """Record no more, and keep nothing."""
        self.is_over = True
        if self.profile is not None:
            self.profile.stop()
            self.profile = None

    def remove_hooks(self) -> None:
        """Not from inside a hook: torch is going through all of them then."""
        for hook in self.hooks:
            hook.remove()


def _say(what: str) -> None:
    print(f"trace: {what}", file=sys.stderr, flush=True)
