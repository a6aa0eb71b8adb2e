"""What a script finds, without a process or a cluster."""

import pytest

from dask_ranks.rank.scripts import own_gpu_at


@pytest.mark.parametrize("local_rank", range(4))
def test_a_script_finds_its_own_gpu_where_dask_cuda_has_put_it_first(local_rank):
    """It takes the GPU of number LOCAL_RANK; of four in a job that lists them by other numbers."""
    gpus = ["4", "5", "6", "7"]
    of_dask_cuda = gpus[local_rank:] + gpus[:local_rank]
    assert own_gpu_at(local_rank, of_dask_cuda) == gpus


def test_a_script_that_sees_one_gpu_keeps_it():
    assert own_gpu_at(1, ["2"]) == ["2"]
