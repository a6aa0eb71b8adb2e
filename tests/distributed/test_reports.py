"""What ranks report, save and print arrives in the run directory."""

import contextlib
import enum
import hashlib
import io
import json
import math
import os
import random
import sys
import tempfile

import cloudpickle
import pytest
import torch
from processes import log_of

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Level(enum.IntEnum):
    LOW = 1


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_reports_of_all_ranks_arrive_with_rank_and_time_in_the_order_of_each_rank(client):
    def train():
        for number in range(500):
            tensor = torch.tensor([number / 2], requires_grad=True)
            ddp.report(number=number, tensor=tensor, level=Level.LOW)

    metrics = ddp.launch(client, train, workers=3).metrics
    assert len(metrics) == 1500
    for rank in range(3):
        mine = metrics[metrics["rank"] == rank]
        assert mine["number"].tolist() == list(range(500))
        assert (mine["tensor"] == mine["number"] / 2).all() and (mine["level"] == 1).all()
        assert mine["time"].is_monotonic_increasing


def test_a_loss_that_is_not_a_number_arrives_and_the_metrics_file_stays_strict_json(client):
    def train():
        for loss in (math.nan, torch.tensor(-math.inf), 1.5):
            ddp.report(loss=loss)

    run = ddp.launch(client, train, workers=1)
    losses = [record["loss"] for record in run.records]
    assert math.isnan(losses[0]) and losses[1:] == [-math.inf, 1.5]
    assert run.metrics["loss"].dtype == float
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["rank"] for line in lines] == [0, 0, 0]


def test_reports_between_steps_carry_epoch_and_step(client):
    def train():
        sampler = ddp.ElasticSampler(10, 4)
        for _ in sampler.epochs(2):
            for _ in sampler.batches():
                ddp.report(loss=0.0)

    metrics = ddp.launch(client, train, workers=2).metrics
    mine = metrics[metrics["rank"] == 1]
    assert mine["epoch"].tolist() == [0, 0, 0, 1, 1, 1]
    assert mine["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert mine["samples"].tolist() == [4, 8, 10, 14, 18, 20]
    assert mine["batch"].tolist() == [4, 4, 2, 4, 4, 2]


def test_the_mean_of_an_epoch_is_that_of_its_samples_with_the_batches_as_weights(client):
    """Three ranks, of which the last batch's one sample goes to the first."""

    def train():
        sampler = ddp.ElasticSampler(9, 4)
        for _ in sampler.epochs(2):
            for rows in sampler.batches():
                ddp.report(loss=sampler.weight * sum(rows) / len(rows))

    metrics = ddp.launch(client, train, workers=3).metrics
    weighed = (metrics.loss * metrics.batch).groupby(metrics.epoch).sum()
    means = weighed / metrics.batch.groupby(metrics.epoch).sum()
    assert means.tolist() == pytest.approx([4.0, 4.0])


def test_what_was_reported_before_a_failure_is_kept(client):
    def train():
        ddp.report(loss=0.25)
        ddp.save_file("last.txt", "words")
        raise RuntimeError("no more")

    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, train, workers=1)
    assert json.loads((caught.value.directory / "metrics.jsonl").read_text())["loss"] == 0.25
    assert (caught.value.directory / "last.txt").read_text() == "words"


def test_saved_files_arrive_byte_for_byte_also_large_ones_from_every_rank(client):
    def content(rank):
        return random.Random(rank).randbytes(3_000_000 + rank)

    def train():
        ddp.save_file(f"large/{ddp.rank()}.bin", content(ddp.rank()))
        ddp.save_file(f"small {ddp.rank()}.txt", "ä\n")
        ddp.save_file("empty", b"")
        return hashlib.sha256(content(0)).hexdigest()

    run = ddp.launch(client, train, workers=2)
    for rank in range(2):
        assert (run.directory / "large" / f"{rank}.bin").read_bytes() == content(rank)
        assert (run.directory / f"small {rank}.txt").read_bytes() == "ä\n".encode()
    assert (run.directory / "empty").read_bytes() == b""


def test_every_line_that_a_rank_prints_is_in_the_log_in_its_order_and_rank_0s_are_shown(
    client, capsys
):
    def train():
        for number in range(500):
            print(f"line {number}")
        print("an error of \udcff", file=sys.stderr)
        print("without an end", end="")

    run = ddp.launch(client, train, workers=2)
    assert capsys.readouterr().out.count("line 499\n") == 1
    for rank in range(2):
        said = [
            line.partition(f"[rank {rank}] ")[2]
            for line in log_of(run.directory).splitlines()
            if f"[rank {rank}] " in line
        ]
        assert [line for line in said if line.startswith("line ")] == [
            f"line {number}" for number in range(500)
        ]
        assert r"an error of \udcff" in said and "without an end" in said


def without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


STREAMS = {
    "latin-1": lambda: io.TextIOWrapper(io.BytesIO(), encoding="latin-1"),
    "a full disk": lambda: open("/dev/full", "w", encoding="utf-8"),
    "a pipe without a reader": without_reader,
    "none": lambda: None,
}


@pytest.mark.parametrize("stream", STREAMS)
def test_what_a_screen_cannot_show_ends_no_run_and_loses_no_result(client, stream, monkeypatch):
    def speak():
        if ddp.rank() == 0:
            print("Größe → 5 µm")
        return "trained"

    stdout = STREAMS[stream]()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stdout)
    try:
        run = ddp.launch(client, speak, workers=2)
    finally:
        monkeypatch.undo()
    if stream == "latin-1":
        assert "Größe \\u2192 5 µm\n".encode("latin-1") in stdout.buffer.getvalue()
    if stdout is not None:
        with contextlib.suppress(OSError):  # of what is left in its buffer
            stdout.close()
    assert run.result == "trained" and run.problems == []
    assert "[rank 0] Größe → 5 µm" in log_of(run.directory)


def test_a_launch_keeps_no_folder_if_it_is_told_so(client, tmp_path, monkeypatch):
    def reports():
        ddp.report(loss=1.0)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests write beside it
    run = ddp.launch(client, reports, workers=2, directory=False)
    assert run.directory is None and len(run.metrics) == 2
    assert not list(tmp_path.iterdir())
