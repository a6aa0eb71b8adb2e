"""The process group of a process that no launcher has started, or only half told."""

import pytest
import torch

from ddp_common import Error, device, process_group, rank, world_size

VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_alone_there_is_one_rank_and_no_process_group():
    with process_group() as where:
        assert (rank(), world_size()) == (0, 1)
        assert where == device()
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "given",
    [
        ("RANK",),
        ("RANK", "WORLD_SIZE"),
        ("MASTER_ADDR", "MASTER_PORT"),
        ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ],
    ids=lambda given: "+".join(given),
)
def test_half_of_a_launchers_variables_is_refused_and_the_missing_ones_are_named(
    monkeypatch, given
):
    for name in given:
        monkeypatch.setenv(name, VARIABLES[name])
    with pytest.raises(Error) as caught, process_group():
        pass
    missing = str(caught.value).partition(" but not ")[2].partition(". ")[0]
    assert missing.split(", ") == [name for name in VARIABLES if name not in given]
