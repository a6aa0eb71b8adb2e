"""A process that no launcher has started; which launcher it was."""

import pytest
import torch

from dask_ranks.without_dask.launchers import started_by
from ddp_common import Error, connect, device, rank, world_size
from ddp_common.rendezvous import process_group, reached_by_others


def test_alone_there_is_one_rank_and_no_process_group():
    with process_group() as where:
        assert (rank(), world_size()) == (0, 1)
        assert where == device()
        assert not torch.distributed.is_initialized()


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"WORLD_SIZE": "", "RANK": ""}, None),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "env://"),
        ({"TORCHELASTIC_RUN_ID": "1", **OPEN_MPI}, "torchrun"),
        ({**MPICH, "PMI_SIZE": "1"}, None),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, "srun"),
        ({**STEP, **MPICH, "SLURM_STEP_NUM_TASKS": "2"}, "srun"),  # as srun --mpi=pmi2
    ],
)
def test_a_process_knows_which_launcher_has_started_it_as_one_of_several(
    monkeypatch, variables, launcher
):
    for name in ("SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", *OPEN_MPI, *MPICH):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_by() == launcher


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, {**STEP, **MPICH}], ids=str)
def test_a_process_of_mpiexec_does_not_train_alone(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Error, match="mpiexec has started .*\n?.*exec python train.py"):
        started_by()


def test_of_the_addresses_found_for_rank_0_one_is_taken_that_other_hosts_reach():
    assert reached_by_others(["127.0.1.1", "10.0.0.7", "127.0.1.1"]) == "10.0.0.7"
    assert reached_by_others(["::1", "fe80::1%eth0"]) == "fe80::1%eth0"
    assert reached_by_others(["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"


def test_no_rank_of_torchrun_starts_a_cluster_of_its_own(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(Error, match="CLUSTER=slurm, and torchrun has started this process"):
        connect("slurm")
