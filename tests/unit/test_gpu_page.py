"""The page for those with GPUs: its blocks of Python run, on a CPU, and do what it says."""

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
import torch.nn.functional as F
from torch import nn

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]
(SCRIPT,) = [code for code in PYTHON if code.startswith("# shapes.py")]
COMMAND = (
    "TORCH_DISTRIBUTED_DEBUG=DETAIL .venv/bin/torchrun --standalone --nproc-per-node 2 shapes.py\n"
)


@pytest.fixture
def names():
    """What the blocks have defined, run one after the other in a process group of one.

    Loader workers come from a forkserver: pytest's process has threads after other tests, and what
    is forked from it may wait for ever.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload(["torch"])
    multiprocessing.set_start_method("forkserver", force=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    defined = {}
    try:
        for code in PYTHON:
            if code is not SCRIPT:
                exec(compile(code, "docs/gpu.md", "exec"), defined)
        yield defined
    finally:
        # Its persistent workers watch the forkserver, which waits for them: nobody else ends them
        defined.clear()
        gc.collect()
        dist.destroy_process_group()
        multiprocessing.set_start_method(method, force=True)


@pytest.fixture
def batch(names):
    x, y = names["data"].tensors
    return x[:50].to(names["device"]), y[:50].to(names["device"])


def test_every_block_is_run_here_or_says_that_it_is_not():
    for language, code in BLOCKS:
        is_marked = code.startswith("# Not run by the tests")
        assert language == "python" or code == COMMAND or is_marked, code
    assert len(PYTHON) == 5


def test_the_loop_trains_in_bfloat16_and_keeps_parameters_in_float32(names, batch):
    x, y = batch
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert names["model"](x).dtype == torch.bfloat16
    with torch.no_grad():
        loss = F.cross_entropy(names["network"](x), y)
    assert math.isfinite(loss)
    for parameter in names["model"].parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
    assert names["sampler"].epoch == 2
    assert names["optimizer"].state  # steps were made


def test_a_step_in_float16_is_left_out_if_a_gradient_is_infinite(names, batch):
    def weights():
        return nn.utils.parameters_to_vector(names["network"].parameters()).detach().clone()

    x, y = batch
    before, scale = weights(), names["scaler"].get_scale()
    assert math.isfinite(names["step_in_float16"](x, y))
    assert not torch.equal(weights(), before)
    before = weights()
    names["step_in_float16"](x, y, weight=math.inf)
    assert torch.equal(weights(), before)
    assert names["scaler"].get_scale() < scale


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_in_parts_has_the_gradients_of_the_whole_batch_and_averages_once(
    names, batch, parts
):
    x, y = batch
    averaged = []

    def note(state, bucket):
        averaged.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    names["model"].register_comm_hook(None, note)
    loss = F.cross_entropy(names["network"](x), y) * 0.5
    expected = torch.autograd.grad(loss, list(names["network"].parameters()))
    names["step_in_parts"](x, y, parts, weight=0.5)
    assert averaged == list(range(len(averaged))) != []  # each bucket once
    for parameter, gradient in zip(names["network"].parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.slow
def test_the_profiler_writes_a_table_and_a_trace(names, batch, tmp_path):
    table = names["profile_steps"](*batch, str(tmp_path / "trace.json"))
    assert "step" in table and "Self CPU" in table
    assert '"step"' in (tmp_path / "trace.json").read_text()


@pytest.mark.slow
def test_detail_names_the_ranks_that_disagree(tmp_path):
    (tmp_path / "shapes.py").write_text(SCRIPT)
    setting, _, arguments = COMMAND.partition(" .venv/bin/torchrun ")
    name, _, value = setting.partition("=")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments.split()],
        cwd=tmp_path,
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "mismatch" in done.stderr and "shape" in done.stderr.lower(), done.stderr
