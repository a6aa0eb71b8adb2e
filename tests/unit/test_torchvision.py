"""torchvision beside a torch without CUDA, in processes that have imported nothing yet."""

import subprocess
import sys

import pytest

FORWARD = "print(tuple(torchvision.models.resnet18().eval()(torch.zeros(1, 3, 32, 32)).shape))"


@pytest.mark.parametrize(
    "order", ["torch, torchvision", "torchvision, torch"], ids=["torch_first", "torchvision_first"]
)
def test_a_torchvision_model_runs_whatever_is_imported_first(order):
    done = subprocess.run(
        [sys.executable, "-c", f"import {order}; {FORWARD}"], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("(1, 1000)\n", 0), done.stderr
