"""Trainers of other libraries: `ddprun` ends with the numbers of torchrun. `make test-others`."""

import functools
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import PATIENCE
from ports import free_port
from processes import separate_cluster

SCRIPTS = Path(__file__).parents[1] / "scripts" / "others"
DDPRUN = [sys.executable, "-m", "dask_ranks", "run", "--workers", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE_HOST = ["--standalone", "--nproc-per-node", "2"]
TWO_HOSTS = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
LIGHTNING_ON = {1: ["2", "1"], 2: ["1", "2"]}  # devices, nodes
# What a job of dask-jobqueue tells its workers: as for Slurm, each of them is alone
OF_A_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "dask-worker",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def of_each(*names):
    """A test for each of these libraries; all tests of one are in one process of pytest."""
    skips = {name: pytest.mark.skipif(not find_spec(name), reason=f"no {name}") for name in names}
    marks = {name: [skips[name], pytest.mark.xdist_group(name)] for name in names}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name]) for name in names]
    )


def script(name, hosts=1):
    """The words of a script, whose two ranks are on so many hosts."""
    return [SCRIPTS / f"with_{name}.py", *(LIGHTNING_ON[hosts] if name == "lightning" else [])]


def numbers(folder, *commands):
    """What programs that run at the same time have to say: the lines RESULT and HOST, in order."""
    folder.mkdir()
    processes = [
        subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        output = "".join(process.communicate(timeout=3 * PATIENCE)[0] for process in processes)
        assert not any(process.returncode for process in processes), output
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=PATIENCE)
    found = re.findall(r"^(?:\[rank \d+\] )?((?:RESULT|HOST) \S+)$", output, flags=re.M)
    assert sum(line.startswith("RESULT") for line in found) == 1, output
    return sorted(found)


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory):
    """The numbers of a script under torchrun, by its name: it is run once."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp(name) / "place"
        return numbers(folder, [*TORCHRUN, *ONE_HOST, *script(name)])

    return run


@of_each("lightning", "accelerate", "timm", "transformers")
def test_a_trainer_ends_with_the_numbers_that_it_has_under_torchrun(
    under_torchrun, tmp_path, name
):
    assert numbers(tmp_path / "ours", [*DDPRUN, *script(name)]) == under_torchrun(name)


@of_each("lightning", "accelerate")
def test_on_two_hosts_it_has_those_of_two_hosts_under_torchrun(tmp_path, name):
    words = script(name, hosts=2)
    torchrun = [*TORCHRUN, *TWO_HOSTS, "--master-port", free_port(), "--node-rank"]
    theirs = numbers(tmp_path / "theirs", [*torchrun, 0, *words], [*torchrun, 1, *words])
    with separate_cluster(tmp_path, hosts=("127.0.0.1", "127.0.0.2")) as (_, address):
        ours = numbers(tmp_path / "ours", [*DDPRUN, "--cluster", address, *words])
    assert ours == theirs and len(ours) == 3, "rank 0's number, and a line of each host"


@of_each("lightning", "accelerate", "timm")
def test_in_jobs_of_slurm_it_has_them_too(under_torchrun, tmp_path, name):
    words = ["env", *(f"{variable}={value}" for variable, value in OF_A_JOB.items())]
    with separate_cluster(tmp_path, *words) as (_, address):
        ours = numbers(tmp_path / "ours", [*DDPRUN, "--cluster", address, *script(name)])
    assert ours == under_torchrun(name)
