"""What docs/migration.md says of a torchrun script's lines that name a device."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="the page quotes a torch without CUDA"
)


def row_with(line):
    (row,) = [row for row in PAGE.splitlines() if row.startswith("|") and line in row]
    return row


@pytest.mark.parametrize(
    "line, run",
    [
        ("torch.cuda.set_device(local_rank)", lambda: torch.cuda.set_device(0)),
        ("torch.device(0)", lambda: torch.device(0)),
    ],
)
def test_lines_that_fail_without_a_gpu_fail_with_the_words_of_the_page(line, run):
    (words,) = re.findall(r"\(`(.*?)`\)", row_with(line))
    with pytest.raises((AttributeError, RuntimeError), match=re.escape(words)):
        run()


def test_a_device_named_by_its_text_fails_at_its_first_tensor():
    assert "at its first tensor" in row_with('"cuda:0"')
    device = torch.device("cuda:0")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device=device)


def test_device_ids_are_refused_on_the_cpu():
    assert "torch refuses `device_ids` with a ValueError" in row_with("device_ids=[local_rank]")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="device_ids"):
            DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[0])
    finally:
        dist.destroy_process_group()
