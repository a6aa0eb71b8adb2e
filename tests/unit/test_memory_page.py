"""The page on memory: its program counts what each way to train holds, its tables are right.

The program runs on real ranks with a small model. Bytes are compared exactly.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "when-ddp-is-not-enough.md").read_text()
PROGRAM = DOCS / "examples" / "memory_per_rank.py"
WIDTH, BLOCKS, ROWS = 32, 2, 8  # small: a rank on the CPU takes no time for them
TENSORS = 2 * BLOCKS
WEIGHTS = 4 * BLOCKS * 8 * WIDTH**2  # bytes, float32
COUNTERS = 4 * TENSORS  # Adam's, one float32 for each tensor


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def measured(request, tmp_path_factory):
    """(number of ranks, what the program has measured on them)."""
    path = tmp_path_factory.mktemp("memory") / "bytes.json"
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {request.param}".split()
    sizes = f"--width {WIDTH} --blocks {BLOCKS} --rows {ROWS}".split()
    command = [sys.executable, *torchrun, str(PROGRAM), *sizes, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(path.read_text())


@pytest.mark.slow
def test_every_rank_holds_the_bytes_of_the_formula(measured):
    ranks, found = measured
    assert found["parameters"] == WEIGHTS // 4
    assert len(found["ways"]) == 4
    for way, result in found["ways"].items():
        assert result["ranks"] == [result["formula"]] * ranks, way


@pytest.mark.slow
def test_what_each_way_saves(measured):
    ranks, found = measured
    plain, views, zero, fsdp = (result["ranks"][0] for result in found["ways"].values())
    assert plain == {
        "parameters": WEIGHTS,
        "gradients": 2 * WEIGHTS,
        "optimizer": 2 * WEIGHTS + COUNTERS,
    }
    assert views == plain | {"gradients": WEIGHTS}
    assert zero == views | {"optimizer": views["optimizer"] // ranks}
    assert fsdp == {
        "parameters": WEIGHTS // ranks,
        "gradients": WEIGHTS // ranks,
        "optimizer": 2 * WEIGHTS // ranks + COUNTERS,
    }


@pytest.mark.slow
def test_all_ways_train_the_same_model(measured):
    _, found = measured
    losses = [result["loss"] for result in found["ways"].values()]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.slow
def test_what_checkpointing_and_bfloat16_do_to_activations(measured):
    _, found = measured
    row = ROWS * WIDTH  # numbers in one activation of a block's width
    copies = 2 * (WEIGHTS // 4 - 4 * WIDTH**2)  # the first matrix passes no gradient on
    mean_and_deviation = 2 * ROWS * (BLOCKS - 1)  # of layer_norm, which stays in float32
    assert found["activations"] == {
        "float32": 4 * (row * (10 * BLOCKS - 1) + mean_and_deviation),
        "bfloat16": 2 * 9 * row * BLOCKS + 4 * (row * (BLOCKS - 1) + mean_and_deviation),
        "  and copies of parameters": copies,
        "float32, checkpointed": 4 * row * BLOCKS,  # the input of each block
    }


def weights_after_two_steps(path, way):
    """What a rank does: two steps of a small network. Its weights, gathered on rank 0."""
    spec = importlib.util.spec_from_file_location("memory_per_rank", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    torch.manual_seed(0)
    network = program.Network(WIDTH, BLOCKS)
    model, optimizer, buckets = program.WAYS[way](network)
    batches = torch.randn(2, ddp.world_size(), ROWS, WIDTH)[:, ddp.rank()]
    for batch in batches:
        optimizer.zero_grad()
        buckets.clear()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        ddp.report(loss=loss)
    return get_model_state_dict(
        network, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def test_all_ways_end_with_the_same_weights_under_launch(client, tmp_path):
    found = {}
    for way in module(PROGRAM).WAYS:
        arguments = dict(path=str(PROGRAM), way=way, directory=tmp_path / way)
        run = ddp.launch(client, weights_after_two_steps, workers=2, **arguments)
        assert len(run.metrics) == 4
        found[way] = run.result
    assert sum(4 * each.numel() for each in found["FSDP"].values()) == WEIGHTS
    for weights in found.values():
        torch.testing.assert_close(weights, found["DDP"])


def test_the_lines_that_change_make_a_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zero_1, fsdp, save = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        kinds = step_with(zero_1), step_with(fsdp + save)
    finally:
        dist.destroy_process_group()
    assert kinds[0] == (DDP, ZeroRedundancyOptimizer)
    assert issubclass(kinds[1][0], FSDPModule) and kinds[1][1] is torch.optim.Adam
    module(PROGRAM).Network(WIDTH, BLOCKS).load_state_dict(torch.load("model.pt"))


def step_with(code):
    """Make a step with what lines of the page have made; the types of model and optimizer."""
    names = {
        "network": module(PROGRAM).Network(WIDTH, BLOCKS),
        "torch": torch,
        "dist": dist,
        "DDP": DDP,
        "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
        "fully_shard": fully_shard,
    }
    exec(compile(code, "docs/when-ddp-is-not-enough.md", "exec"), names)
    model, batch = names.get("model", names["network"]), torch.randn(ROWS, WIDTH)
    before = model(batch).square().mean()
    before.backward()
    names["optimizer"].step()
    assert model(batch).square().mean() != before
    return type(model), type(names["optimizer"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_tables_of_the_page_are_those_of_the_formula(ranks):
    program = module(PROGRAM)
    parameters, tensors = 6 * 8 * 1024**2, 12
    (table,) = re.findall(rf"{parameters:,} parameters, {ranks} ranks:.*\n((?:\|.*\n)+)", PAGE)
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]
    assert [row[0] for row in shown] == list(program.WAYS)
    for way, *cells, process, peak, loss in shown:
        held = program.formula(way, parameters, tensors, ranks)
        assert cells == [f"{number / 2**20:.1f}" for number in (*held, sum(held), sum(held))]
        assert loss == shown[0][-1]
        assert float(process) == pytest.approx(sum(held) / 2**20, rel=0.03)
        assert float(process) < float(peak)


def test_the_flowchart_is_what_its_program_draws():
    drawing = module(DOCS / "pictures" / "draw_choice.py")
    assert drawing.FILE.read_text() == drawing.drawing()
    assert f"![{drawing.ALT}](pictures/{drawing.FILE.name})" in PAGE


def test_the_text_of_the_flowchart_stays_within_its_boxes():
    """A character of 13 points is at most 7.5 wide on average, in the fonts of browsers."""
    drawing = module(DOCS / "pictures" / "draw_choice.py")
    ElementTree.fromstring(drawing.drawing())  # well-formed
    for box in drawing.BOXES:
        assert max(map(len, box.lines)) * 7.5 <= box.width, box.lines
        assert len(box.lines) * drawing.LINE <= box.height, box.lines
        assert 0 <= box.left and box.left + box.width <= drawing.WIDTH
        assert 0 <= box.top and box.top + box.height <= drawing.HEIGHT
