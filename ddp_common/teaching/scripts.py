"""Run a script of a student's under torchrun, whatever it does.

Relies on torchrun to start the ranks, as the student would; torch is imported once for all of them
(`forked_torchrun`). Promises: it ends in time, with all
that it has started; what it printed is kept, as far as anybody would read it; it runs in a folder
of its own, so that nothing is overwritten.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ddp_common.teaching.contained import TIMED_OUT
from ddp_common.teaching.shown import HeadAndTail
from ddp_common.without_dask.starting import meet_in

GRACE = 30.0  # seconds beyond the time-out that ending everything may take


@dataclass
class ScriptRun:
    """How a script ran."""

    exit_code: int | None  # of torchrun; None if it was ended at the time-out
    output: str  # what all ranks printed, the middle left out where that is much
    folder: Path  # in which it ran; it is removed with this object
    seconds: float
    _temporary: tempfile.TemporaryDirectory

    @property
    def timed_out(self) -> bool:
        """Whether it was ended because it took too long."""
        return self.exit_code is None

    @property
    def ok(self) -> bool:
        """Whether all ranks have ended without an error."""
        return self.exit_code == 0


def run_script(
    source: str | Path, *arguments: str, ranks: int = 2, timeout: float = 60.0
) -> ScriptRun:
    """Run a script with torchrun on `ranks` processes of this machine.

    `source` is the path of the script, or its text as a str. `arguments` are its own. After
    `timeout` seconds it is ended. Each line of the output begins with the rank that printed it.
    """
    temporary = tempfile.TemporaryDirectory(prefix="ddp-script-", ignore_cleanup_errors=True)
    folder = Path(temporary.name).resolve()
    script = source.resolve() if isinstance(source, Path) else folder / "script.py"
    if not isinstance(source, Path):
        script.write_text(source, encoding="utf-8")
    # In place of --standalone, whose port every user of this host reaches
    options = [*meet_in(folder), f"--nproc-per-node={ranks}", "--role=rank", "--tee=3"]
    if hasattr(os, "pidfd_open"):
        torchrun = ["ddp_common.teaching.forked_torchrun", str(folder), *options]
        torchrun += ["--module", "ddp_common.teaching.forked_rank"]
    else:
        torchrun = ["torch.distributed.run", *options]
        torchrun += ["--module", "ddp_common.teaching.whole_lines"]
    contained = [sys.executable, "-m", "ddp_common.teaching.contained", str(timeout)]
    shown = HeadAndTail()
    began = time.monotonic()
    with subprocess.Popen(
        [*contained, sys.executable, "-m", *torchrun, str(script), *arguments],
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C reaches the caller, who ends it
    ) as process:
        try:
            assert process.stdout is not None, "it is a pipe"
            while piece := process.stdout.read(2**16):
                shown.write(piece)
            code = process.wait(timeout + GRACE)
        finally:
            process.terminate()  # where it has not ended: Ctrl-C
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)  # `with` waits a quarter of a second after Ctrl-C
    return ScriptRun(
        exit_code=None if code == TIMED_OUT else code,
        output=shown.text(),
        folder=folder,
        seconds=time.monotonic() - began,
        _temporary=temporary,
    )


def _environment():
    """This process's own, with this package importable from any folder, one thread for a rank."""
    here = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": here if not path else os.pathsep.join([here, path]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
