"""A run directory on object storage: a real server that speaks S3 (`endpoint`)."""

import faults_on_purpose as faults
import fsspec
import pytest
import torch
from processes import TESTS, environment_for, finished

import ddp_common as ddp


@pytest.fixture
def bucket(s3):
    """The URL of an empty bucket."""
    s3.mkdir("runs")
    return "s3://runs"


def test_a_run_is_resumed_from_s3_by_another_program(client, bucket, tmp_path):
    undisturbed = ddp.launch(
        client, faults.train, workers=2, directory=tmp_path / "undisturbed"
    ).result
    with pytest.raises(ddp.RankFailed):
        ddp.launch(
            client,
            ddp.inject(faults.train, "kill", step=8),
            workers=2,
            directory=f"{bucket}/second",
            pause=0.1,
        )
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [client.scheduler.address, f"{bucket}/second", tmp_path / "weights.pt"]
    finished(tmp_path / "program.py", *words, env=environment_for(client, tmp_path))
    assert torch.equal(torch.load(tmp_path / "weights.pt"), undisturbed)
    with fsspec.open(f"{bucket}/second/log.txt", "r") as file:
        assert "Resumed from step-" in file.read()


PROGRAM = f"""
import sys
sys.path.append({TESTS!r})
import torch
from distributed import Client
import ddp_common as ddp
from faults_on_purpose import train

address, directory, weights = sys.argv[1:]
with Client(address) as client:
    torch.save(ddp.launch(client, train, workers=2, directory=directory).result, weights)
"""


def test_a_bucket_that_does_not_exist_is_an_error_in_words(client, bucket):
    with pytest.raises(ddp.Error, match="s3://nobodys-bucket/run cannot be (reached|written).*"):
        ddp.launch(client, faults.train, workers=2, directory="s3://nobodys-bucket/run")
