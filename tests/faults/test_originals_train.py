"""What the articles trained: three steps of each on two ranks, and what they leave."""

import json

import pytest
import yaml
from command_line import ROOT, command, finish
from processes import saved_steps

NUMBERS = yaml.safe_load((ROOT / "tutorials" / "originals.yaml").read_text())
QUICK = {  # three steps of these end in seconds
    "mnist": "loader_workers=1",
    "pets": "batch_per_rank=256 names=5",
    "dogs": "batch_per_rank=4 resize=32 crop=32 loader_workers=1",
    "ucmerced": "network=resnet18 size=32 report_every=1",
}


@pytest.mark.parametrize("name", QUICK)
def test_three_steps_on_two_ranks(tmp_path, name):
    chosen = {"PRESET": "original", "SET": f"epochs=1 steps=3 {QUICK[name]}", "WORKERS": "2"}
    code, out, error = finish(command("run", name, runs=tmp_path, **chosen))
    assert code == 0, error
    (directory,) = (tmp_path / name).iterdir()
    records = list(map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()))
    losses = {(row["step"], row["rank"]): row["loss"] for row in records if "loss" in row}
    assert sorted(losses) == [(step, rank) for step in (1, 2, 3) for rank in (0, 1)]
    config = json.loads((directory / "config.json").read_text())
    assert config["preset"] == "original" and NUMBERS[name].keys() <= config["settings"].keys()
    assert saved_steps(directory) == [3]
    WHAT_IT_LEAVES[name](directory, records, losses, out)


def mnist_leaves(directory, records, losses, out):
    (mean,) = [row["epoch_loss"] for row in records if "epoch_loss" in row]
    assert mean == pytest.approx(sum(losses.values()) / 6) and f"loss {mean:.4f}" in out
    resumed = command("run", "mnist", runs=directory, RESUME=str(directory), SET="epochs=2")
    code, out, error = finish(resumed)  # without PRESET
    assert code == 0 and "it goes on from step 3" in out and "epoch 2 of 2: loss" in out, error


def pets_leaves(directory, records, losses, out):
    for rank in (0, 1):
        record = json.loads((directory / f"epochs/epoch-0-rank-{rank}.json").read_text())
        assert set(record) == {"loss", "time", "epoch", "worker"} and record["worker"] == rank
    assert (directory / "names.txt").exists() and "that were drawn, passed the filter" in out


def dogs_leaves(directory, records, losses, out):
    (judged,) = [row["held_out_accuracy"] for row in records if "held_out_accuracy" in row]
    assert records[0]["rate"] == 0.02 and records[0]["batch"] == 8  # of two ranks
    assert f"after 3 steps, 24 images: held-out accuracy {judged:.1%}" in out


def ucmerced_leaves(directory, records, losses, out):
    head, *rows = (directory / "confusion.csv").read_text().splitlines()
    counts = [list(map(int, row.split(",")[1:])) for row in rows]
    assert head.startswith("actual,agricultural,") and list(map(sum, counts)) == [100] * 21


WHAT_IT_LEAVES = {
    "mnist": mnist_leaves,
    "pets": pets_leaves,
    "dogs": dogs_leaves,
    "ucmerced": ucmerced_leaves,
}
