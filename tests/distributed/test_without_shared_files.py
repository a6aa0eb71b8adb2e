"""Workers that cannot see the run directory.

Their checkpoints reach the client all the same, and come back to them for a restart. The workers
run in a mount namespace of their own, where something else lies over the run directory.
"""

import asyncio
import errno
import os
import re
import shutil
import sys
import time

import cloudpickle
import faults_on_purpose as faults
import pytest
import torch
import torch.distributed as dist
from processes import log_of, saved_steps

import ddp_common as ddp
from dask_ranks.client import attempt, checkpoints
from dask_ranks.worker import spool
from ddp_common import checkpoint

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_checkpoints_reach_the_client_and_a_restart_goes_on_from_them(apart, tmp_path):
    client, hidden = apart
    undisturbed = ddp.launch(client, faults.train, workers=2, directory=hidden / "undisturbed")
    assert saved_steps(hidden / "undisturbed")[-1] == 14
    dies = ddp.inject(faults.train, "kill", rank=0, step=8, mark=tmp_path / "mark")
    run = ddp.launch(client, dies, workers=2, restarts=1, directory=hidden / "run", pause=0.05)
    assert torch.equal(run.result, undisturbed.result)
    (event,) = [record for record in run.records if record.get("event") == "restart"]
    assert event["step"] in (0, 3, 6)  # the last save may still be on its way to the client
    assert list(client.run(os.listdir, str(hidden)).values()) == [[], []]


def test_a_checkpoint_that_cannot_be_fetched_is_told_while_training_goes_on(apart, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    client, hidden = apart
    monkeypatch.setattr(checkpoints.files, "digest", full)
    folder, told = hidden / "full", []
    options = {"workers": 2, "directory": folder, "pause": 0.1}
    run = ddp.launch(
        client,
        faults.train,
        on_report=lambda record: told.append("could not be fetched" in log_of(folder)),
        **options,
    )
    assert told[-1] and len(run.problems) == 1 and "No space left" in run.problems[0]
    kept, address = re.search(r"it is in (/\S+) of the worker (\S+)\b", run.problems[0]).groups()
    (names,) = client.run(os.listdir, kept, workers=[address]).values()
    assert any(name.startswith("step-00000014") for name in names)
    client.run(shutil.rmtree, kept, workers=[address])


def spools(dask_worker):
    return [name for name in os.listdir(dask_worker.local_directory) if name.startswith("ddp-")]


def save_slowly_and_fail(model):
    """What is still being written when the function raises is whole, and told."""
    sync = checkpoint.sync
    checkpoint.sync = lambda file: (time.sleep(1), sync(file))
    ddp.Checkpoint(model=model).save()
    if ddp.rank() == 0:
        raise RuntimeError("on purpose")
    dist.barrier()


def test_a_save_that_goes_on_when_the_function_raises_comes_and_nothing_stays_on_workers(apart):
    client, hidden = apart
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ddp.RankFailed, match="on purpose"):
        ddp.launch(
            client, save_slowly_and_fail, workers=2, directory=hidden / "raised", model=model
        )
    assert saved_steps(hidden / "raised") == [0]
    assert list(client.run(spools).values()) == [[], []]


def test_the_time_to_answer_is_not_that_to_write_a_checkpoint(apart, monkeypatch):
    client, hidden = apart
    ddp.launch(client, faults.train, workers=2, directory=hidden / "slow")
    write = spool.write

    async def write_slowly(*arguments, dask_worker):
        await asyncio.sleep(3)
        await write(*arguments, dask_worker=dask_worker)

    monkeypatch.setattr(spool, "write", write_slowly)
    monkeypatch.setattr(attempt, "ANSWER_TIMEOUT", 1)
    ddp.launch(client, faults.train, workers=2, directory=hidden / "slow", timeout=1)
    monkeypatch.setattr(attempt, "COPY_TIMEOUT", 1)
    with pytest.raises(ddp.Error, match="did not answer for 1 s"):
        ddp.launch(client, faults.train, workers=2, directory=hidden / "slow", timeout=1)
    time.sleep(3)  # what was still to be written does not come back either
    assert list(client.run(spools).values()) == [[], []]
