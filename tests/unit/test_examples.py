"""What users copy from the README and from the page on GPUs runs, and does what it says."""

import gc
import math
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def blocks_of(page):
    """The blocks of Python of a page, in their order."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.M | re.S)


def test_the_example_of_the_readme_trains(tmp_path):
    (code,) = blocks_of("README.md")
    (tmp_path / "mine.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "mine.py"],
        cwd=tmp_path,
        env=os.environ | {"WORKERS": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split()[1]) for line in done.stdout.splitlines() if re.match(r"\d ", line)
    ]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.fixture
def names():
    """What the blocks of the page on GPUs have defined, in a process group of one, on any device.

    Loader workers come from a forkserver: pytest's process has threads after other tests, and what
    is forked from it may wait for ever.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload(["torch"])
    multiprocessing.set_start_method("forkserver", force=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    defined = {}
    try:
        for code in blocks_of("docs/gpu.md"):
            if not code.startswith("# shapes.py"):  # a program of its own, in tests/faults
                exec(compile(code, "docs/gpu.md", "exec"), defined)
        yield defined
    finally:
        # Its persistent workers watch the forkserver, which waits for them: nobody else ends them
        defined.clear()
        gc.collect()
        dist.destroy_process_group()
        multiprocessing.set_start_method(method, force=True)


def test_the_blocks_on_mixed_precision_and_large_batches_train(names, tmp_path):
    x, y = names["data"].tensors
    x, y = x[:50].to(names["device"]), y[:50].to(names["device"])
    parameters = list(names["network"].parameters())
    assert names["sampler"].epoch == 2
    assert all(each.dtype == each.grad.dtype == torch.float32 for each in parameters)

    before = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
    names["step_in_float16"](x, y, weight=math.inf)  # its gradients are left out
    assert torch.equal(torch.nn.utils.parameters_to_vector(parameters), before)

    loss = torch.nn.functional.cross_entropy(names["network"](x), y) * 0.5
    expected = torch.autograd.grad(loss, parameters)
    names["step_in_parts"](x, y, 4, weight=0.5)
    for parameter, gradient in zip(parameters, expected):
        torch.testing.assert_close(parameter.grad, gradient)

    table = names["profile_steps"](x, y, str(tmp_path / "trace.json"))
    assert "Self CPU" in table and (tmp_path / "trace.json").exists()
