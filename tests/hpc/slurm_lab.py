"""A Slurm of four nodes to practise on: `make slurm-lab`.

It opens a shell on the login host, in the repository; COMMAND="…" runs one command there instead,
and ends with its exit code. All commands of Slurm are real. At the end of the shell all is gone,
the jobs too, also when its terminal is closed.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `patience`

from runs_here import ROOT
from slurm_here import CPUS, PROGRAMS_OF_DATABASE, not_installed, running_slurm, why_not

OF_MAKE = ("COMMAND", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
IN_A_CONTAINER = "podman run --rm -it --privileged ddp-slurm-lab"
WELCOME = f"""\
You are on the login host of a Slurm with four nodes, node-1 to node-4, of {CPUS} cores each.
sinfo, sbatch, squeue, srun, salloc, scancel and scontrol are real; `{{sacct}}` lists the jobs that
have ended. `exit` ends all of it.
  sbatch clusters/batch/mnist.sbatch
  make run TUTORIAL=pets CLUSTER=slurm WORKERS=4 RESTARTS=2 OPTIONS="cores=1"
  scontrol update NodeName=node-2 State=DOWN Reason=practice
"""


def main():
    if reason := why_not():
        sys.exit(
            f"No Slurm can be started here: {reason}.\n"
            "In a container it can: `podman build --target slurm-lab -t ddp-slurm-lab .`, then\n"
            f"`{IN_A_CONTAINER}`. Docker takes the same lines."
        )
    # However this program is told to end, what is started below ends with it
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    command = os.environ.get("COMMAND")
    with tempfile.TemporaryDirectory(prefix="slurm-lab-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # jobs of any user write there
        has_database = not not_installed(PROGRAMS_OF_DATABASE)
        with running_slurm(folder, has_database, kill_wait=30, has_default_route=True) as slurm:
            environment = {
                name: value for name, value in slurm.environment.items() if name not in OF_MAKE
            }
            shell = ["bash", "-c", command]
            if not command:
                (folder / "bashrc").write_text("PS1='login$ '\n")
                shell = ["bash", "--rcfile", folder / "bashrc", "-i"]
                print(WELCOME.format(sacct="sacct" if has_database else "sacct -c"), flush=True)
            code = slurm.login.start(shell, cwd=ROOT, env=environment).wait()
    sys.exit(code)


if __name__ == "__main__":
    main()
