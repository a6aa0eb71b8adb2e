"""Scripts under `ddprun` and under torchrun, and the numbers that they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

SCRIPTS = Path(__file__).parent / "scripts"
DDPRUN = [sys.executable, "-m", "dask_ranks", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
CONFIG = "lr: 0.01\nsteps: 10\nbatch: 8\n"


def started(command, folder, **variables):
    folder.mkdir(exist_ok=True)
    folder.joinpath("config.yaml").write_text(CONFIG)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "CLUSTER")}
    return subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=kept | {"RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def said(command, folder, code=0, **variables):
    process = started(command, folder, **variables)
    output, _ = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode == code, output
    return output


def under_torchrun(words, folder):
    """What ranks of torchrun say. gloo of torch 2.13 may abort at their end: then once more."""
    for _ in range(5):
        process = started([*TORCHRUN, "--nproc-per-node", "2", *words], folder)
        output, _ = process.communicate(timeout=3 * PATIENCE)
        if "terminate called without an active exception" not in output:
            break
    assert process.returncode == 0, output
    return output


def result(output):
    return re.findall(r"^RESULT (\S+)$", output, flags=re.M)


def results_of_both(words, folder, **variables):
    """What a script, with its arguments, has found under `ddprun` (`variables`) and torchrun."""
    script, *arguments = words
    words = [SCRIPTS / script, *arguments]
    ours = said([*DDPRUN, "--workers", "2", *words], folder / "ours", **variables)
    return result(ours), result(under_torchrun(words, folder / "theirs"))
