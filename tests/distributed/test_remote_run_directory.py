"""A run directory on object storage: a real server that speaks S3 (`endpoint`)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch

import ddp_common as ddp
from ddp_common.ranks.checkpoint_files import step_of
from ddp_common.run import places
from ddp_common.teaching import faults


@pytest.fixture
def bucket(s3):
    """The URL of an empty bucket."""
    s3.mkdir("runs")
    return "s3://runs"


def listing(url):
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    return sorted(
        name.removeprefix(url.removeprefix("s3://")).lstrip("/") for name in filesystem.find(url)
    )


def test_a_run_leaves_everything_on_s3(client, bucket):
    run = ddp.launch(client, faults.train, workers=2, directory=f"{bucket}/first")
    *names, config, log, metrics = listing(f"{bucket}/first")
    assert (config, log, metrics) == ("config.json", "log.txt", "metrics.jsonl")
    assert [step_of(name) for name in names] == [12, 14]
    with fsspec.open(f"{bucket}/first/metrics.jsonl") as file:
        assert len(file.readlines()) == len(run.records) == 28
    assert places.shown(run.directory) == f"{bucket}/first"
    assert places.shown(run.directory / "trace" / "a.gz") == f"{bucket}/first/trace/a.gz"


def test_a_run_is_resumed_from_s3_by_another_program(client, bucket, tmp_path):
    undisturbed = ddp.launch(
        client, faults.train, workers=2, directory=tmp_path / "undisturbed"
    ).result
    with pytest.raises(ddp.RankFailed):
        ddp.launch(
            client,
            faults.inject(faults.train, "SIGKILL", step=8),
            workers=2,
            directory=f"{bucket}/second",
            pause=0.1,
        )
    forget(f"{bucket}/second")
    run = ddp.launch(client, faults.train, workers=2, directory=f"{bucket}/second")
    assert torch.equal(run.result, undisturbed)
    assert re.search(r"Resumed from step-0000000[36]\.", (run.directory / "log.txt").read_text())
    # retention reaches there too
    assert "checkpoints/step-00000003" not in str(listing(f"{bucket}/second"))


def forget(url):
    """Be a new program: what the old one had on this machine is gone."""
    mirror = places.mirrors.pop(url)
    mirror.finish()
    assert not mirror.path.exists()
    mirror.push()  # its thread may do so once more: the remote copy stays
    assert "config.json" in listing(url)


def test_make_run_trains_and_resumes_on_s3(bucket):
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "RUNS": f"{bucket}/mine",
        "SET": "epochs=1 hidden=8 batch_size=4096",
        "WORKERS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "ddp_common", "run", "pets"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (url,) = [line.split()[-1] for line in done.stdout.splitlines() if "Run directory:" in line]
    assert url.startswith(f"{bucket}/mine/pets/")
    assert {"config.json", "loss.png", "names.txt"} <= set(
        listing(url)
    )  # what the tutorial wrote after the launch, too
    again = subprocess.run(
        [sys.executable, "-m", "ddp_common", "run", "pets", "--resume", url, "--set", "epochs=2"],
        cwd=root,
        env={**environment, "SET": ""},
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    with fsspec.open(f"{url}/config.json") as file:
        assert json.load(file)["settings"]["hidden"] == 8
    with fsspec.open(f"{url}/log.txt", "r") as file:
        assert "Resumed from step-" in file.read()


def test_a_bucket_that_does_not_exist_is_an_error_in_words(client, bucket):
    with pytest.raises(ddp.Error, match="s3://nobodys-bucket/run cannot be (reached|written).*"):
        ddp.launch(client, faults.train, workers=2, directory="s3://nobodys-bucket/run")


def test_an_unknown_protocol_is_an_error_in_words(client):
    with pytest.raises(ddp.Error, match="cannot be reached|one more package"):
        ddp.launch(client, faults.train, workers=2, directory="nosuch://bucket/run")
