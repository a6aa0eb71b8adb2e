"""Blocks of the pages that need a cluster, a server or several ranks run, and do what is said."""

import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_common.data import datasets

DOCS = Path(__file__).parents[2] / "docs"
MEMORY = DOCS / "examples" / "memory_per_rank.py"
WIDTH, BLOCKS, ROWS = 32, 2, 8  # of a small network


def blocks_of(page):
    """The blocks of Python of a page, in their order."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), flags=re.M | re.S)


def torchrun(*words, **variables):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", *map(str, words)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


def test_the_answers_to_questions_do_what_they_say(client):
    logged = []
    names = {"client": client, "log": lambda *what: logged.append(what), "__name__": "faq"}
    for code in blocks_of("faq.md"):
        exec(compile(code, "docs/faq.md", "exec"), names)
    assert names["run"].result.shape == (1, 3)
    assert [step for _, _, step in logged] == [*range(1, 9)]  # one line a step, not one a rank
    # the second launch added two epochs to the two of the first, and repeated none
    steps = names["again"].metrics.groupby("rank")["step"].apply(list)
    assert all(of_rank == [*range(1, 17)] for of_rank in steps)


def test_every_rank_records_its_steps_as_the_page_on_slow_steps_shows(client):
    names = {"client": client, "__name__": "slow_steps"}
    (code,) = blocks_of("slow-steps.md")
    exec(compile(code, "docs/slow-steps.md", "exec"), names)
    for rank in range(2):
        path = names["run"].directory / "trace" / f"rank-{rank}.json.gz"
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        seen = [event["name"] for event in events if event.get("ph") == "X"]
        assert {f"ProfilerStep#{step}" for step in (2, 3, 4)} <= {*seen}
        for what in ("gloo:all_reduce", "DistributedDataParallel.forward", "Optimizer.step"):
            assert any(name.startswith(what) for name in seen), what


def test_images_are_read_as_the_page_on_images_shows(tmp_path, s3, capsys):
    drawn, folder = Path(datasets.fetch("dogs").path), tmp_path / "dogs"
    for breed in ("beagle", "pug"):
        (folder / breed).mkdir(parents=True)
        for path in sorted((drawn / breed).iterdir())[:8]:
            shutil.copy(path, folder / breed)
    s3.mkdir("kennel")
    s3.put(str(folder), "kennel/", recursive=True)
    (tmp_path / "cache").mkdir()
    names = {"folder": str(folder), "cache": str(tmp_path / "cache")}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for block in blocks_of("images.md"):
            exec(block, names)
    said = capsys.readouterr().out
    assert "the images from the bucket are those from the disk, bit for bit" in said
    assert "1 image was left out" in said


def test_torch_names_the_shapes_that_differ_as_the_page_on_gpus_shows(tmp_path):
    (script,) = [code for code in blocks_of("gpu.md") if code.startswith("# shapes.py")]
    (tmp_path / "shapes.py").write_text(script)
    done = torchrun(tmp_path / "shapes.py", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode != 0
    assert "mismatch" in done.stderr and "shape" in done.stderr.lower(), done.stderr


def test_every_way_to_train_holds_the_bytes_that_the_page_on_memory_says(tmp_path):
    sizes = f"--width {WIDTH} --blocks {BLOCKS} --rows {ROWS}".split()
    done = torchrun(MEMORY, *sizes, "--json", tmp_path / "bytes.json")
    assert done.returncode == 0, done.stderr
    ways = json.loads((tmp_path / "bytes.json").read_text())["ways"]
    assert len(ways) == 4
    for way, result in ways.items():
        assert result["ranks"] == [result["formula"]] * 2, way
    losses = [result["loss"] for result in ways.values()]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


def test_the_lines_that_change_with_the_way_to_train_make_a_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    specification = importlib.util.spec_from_file_location("memory_per_rank", MEMORY)
    program = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(program)
    zero_1, fsdp, save = blocks_of("when-ddp-is-not-enough.md")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for code in (zero_1, fsdp + save):
            names = {
                "network": program.Network(WIDTH, BLOCKS),
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
    finally:
        dist.destroy_process_group()
    program.Network(WIDTH, BLOCKS).load_state_dict(torch.load("model.pt"))
