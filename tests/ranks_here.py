"""Ranks without Dask, as torchrun or srun would start them: forked where torch is imported."""

import atexit
import multiprocessing
import os
import signal
import sys

JOIN_TIMEOUT = 60.0  # seconds, on a busy machine

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["dask_ranks.rank.process", "ddp_common.checkpoint"])


class Rank:
    """A process that executes `code`, in which `ddp` is the package."""

    def __init__(self, code, folder, variables, join_timeout=JOIN_TIMEOUT):
        folder.mkdir(exist_ok=True)
        self.output = folder / f"said-{len(list(folder.glob('said-*')))}"
        self.output.touch()
        self.process = _context.Process(
            target=_be_rank, args=(code, variables, join_timeout, str(self.output))
        )
        self.process.start()
        atexit.register(self.process.kill)  # where a test has failed

    def said(self, within=120):
        """All that it has printed, once it has ended."""
        self.process.join(within)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"still running after {within} s: {self.output.read_text()}")
        return self.output.read_text()

    def complaint(self):
        """The last line of it, for a rank that fails."""
        said = self.said()
        assert self.process.exitcode == 1, said
        return said.strip().splitlines()[-1]


def _be_rank(code, variables, join_timeout, output):
    import ddp_common as ddp
    from ddp_common import rendezvous

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(end, 1)
    os.dup2(end, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        del os.environ[name]
    os.environ.update(variables)
    rendezvous.JOIN_TIMEOUT = join_timeout
    exec(code, {"__name__": "__main__", "ddp": ddp, "sys": sys})


def torchrun_variables(rank, size, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def slurm_variables(rank, size, job):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
    }
