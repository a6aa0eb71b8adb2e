"""A large result of rank 0 arrives whole."""

import sys

import cloudpickle
import torch

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUMBERS = 25 * 2**20  # of four bytes


def large():
    return {"weights": torch.arange(NUMBERS, dtype=torch.int32), "words": ["kept", None]}


def test_a_result_of_100_mib_arrives_whole(client):
    result = ddp.launch(client, large, workers=2).result
    assert torch.equal(result["weights"], torch.arange(NUMBERS, dtype=torch.int32))
    assert result["words"] == ["kept", None]
