"""Workers that cannot see the run directory.

They run in a mount namespace of their own, where something else lies over the run directory.
"""

import signal
import sys

import cloudpickle
import faults_on_purpose as faults
import pytest
import torch
from processes import processes_of, saved_steps

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_large_checkpoint_arrives_whole(apart):
    def train():
        torch.manual_seed(0)
        sampler = ddp.ElasticSampler(8, 4)
        model = torch.nn.Linear(2500, 2500)  # 25 MB: several pieces
        checkpoint = ddp.Checkpoint(model=model, sampler=sampler)
        checkpoint.restore()
        for _ in sampler.epochs(1):
            for _ in sampler.batches():
                torch.nn.init.constant_(model.weight, sampler.steps_done)
                checkpoint.step()
            checkpoint.save()
        return model.weight[0, 0].item()

    client, hidden = apart
    run = ddp.launch(client, train, workers=2, directory=hidden / "large")
    (path,) = (run.directory / "checkpoints").glob("*.pt")
    assert (torch.load(path)["model"]["weight"] == 2).all()
    again = ddp.launch(client, train, workers=2, directory=hidden / "large")
    assert again.result == 2  # both ranks got it back, and had nothing to do


def test_sigterm_saves_for_the_client_too(apart):
    client, hidden = apart
    with pytest.raises(ddp.RunStopped) as caught:
        ddp.launch(
            client,
            faults.inject(faults.train, "SIGTERM", step=4),
            workers=2,
            directory=hidden / "stopped",
            pause=0.2,
        )
    assert saved_steps(hidden / "stopped")[-1] == caught.value.step
    assert not processes_of(hidden / "stopped")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the client's own is untouched
