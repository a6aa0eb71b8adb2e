"""Workers that cannot see the run directory.

Their checkpoints reach the client all the same, and come back to them for a restart. The workers
run in a mount namespace of their own, where something else lies over the run directory.
"""

import os
import shutil
import signal
import subprocess
import sys

import cloudpickle
import pytest
import torch
from distributed import Client
from fault_lab import processes_of, separate_cluster

import ddp_common as ddp
from ddp_common.ranks.checkpoint_files import checkpoints, fault, step_of
from ddp_common.teaching import faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def can_unshare():
    return (
        shutil.which("unshare")
        and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    )


pytestmark = pytest.mark.skipif(
    not can_unshare(), reason="needs the right to make a mount namespace (root)"
)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A client of two workers, and a folder of its own that they see empty and cannot write."""
    folder, hidden = tmp_path_factory.mktemp("cluster"), tmp_path_factory.mktemp("hidden")
    mount = f'mount -t tmpfs -o ro,size=4k tmpfs {hidden} && exec "$@"'
    hide = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    with separate_cluster(folder, *hide) as (_, address), Client(address) as client:
        client.wait_for_workers(2, timeout=120)
        yield client, hidden


def test_a_rank_does_not_see_the_run_directory(apart):
    client, hidden = apart
    (hidden / "here").touch()
    assert list(client.run(os.listdir, str(hidden)).values()) == [[], []]


def test_checkpoints_reach_the_client_and_a_restart_goes_on_from_them(apart, tmp_path):
    client, hidden = apart
    undisturbed = ddp.launch(client, faults.train, workers=2, directory=hidden / "undisturbed")
    steps = [step_of(path) for path in checkpoints(hidden / "undisturbed" / "checkpoints")]
    # where they come faster than they can be fetched, the newest is taken
    assert steps[-1] == 14 and len(steps) <= 2
    assert not any(map(fault, checkpoints(hidden / "undisturbed" / "checkpoints")))
    for rank in (0, 1):
        faulty = faults.inject(
            faults.train, "SIGKILL", rank=rank, step=8, mark=tmp_path / f"mark{rank}"
        )
        run = ddp.launch(
            client, faulty, workers=2, restarts=1, directory=hidden / f"run{rank}", pause=0.05
        )
        assert torch.equal(run.result, undisturbed.result)
        (event,) = [record for record in run.records if record.get("event") == "restart"]
        assert event["step"] in (0, 3, 6)  # the last save may still be on its way to the client


def test_nothing_stays_on_the_workers(apart):
    client, hidden = apart
    ddp.launch(client, faults.train, workers=2, directory=hidden / "tidy")
    with pytest.raises(ddp.RankFailed):
        ddp.launch(
            client, faults.inject(faults.train, "raise"), workers=2, directory=hidden / "tidy-too"
        )

    def spools(dask_worker):
        return [
            name for name in os.listdir(dask_worker.local_directory) if name.startswith("ddp-")
        ]

    assert list(client.run(spools).values()) == [[], []]


def test_a_large_checkpoint_arrives_whole_and_so_do_those_of_a_second_folder(apart):
    def train():
        sampler = ddp.ElasticSampler(8, 4)
        model = torch.nn.Linear(2500, 2500)  # 25 MB: several pieces
        checkpoint = ddp.Checkpoint(model=model, sampler=sampler)
        best = ddp.Checkpoint(directory="best", sampler=sampler)
        restored = [each.restore() is not None for each in (best, checkpoint)]
        for _ in sampler.epochs(1):
            for _ in sampler:
                torch.nn.init.constant_(model.weight, sampler.steps_done)
            checkpoint.save()
            best.save()
        return model.weight[0, 0].item(), restored

    client, hidden = apart
    run = ddp.launch(client, train, workers=2, directory=hidden / "large")
    (path,) = checkpoints(run.directory / "checkpoints")
    (best,) = checkpoints(run.directory / "checkpoints" / "best")
    assert (
        fault(best) is None
        and fault(path) is None
        and (torch.load(path)["model"]["weight"] == 2).all()
    )
    again = ddp.launch(client, train, workers=2, directory=hidden / "large")
    assert again.result == (2, [True, True])  # the ranks got them back, and had nothing to do


def test_files_of_ranks_reach_the_client(apart):
    def train():
        ddp.save_file(f"notes/{ddp.rank()}.txt", "hello")

    client, hidden = apart
    run = ddp.launch(client, train, workers=2, directory=hidden / "files")
    notes = sorted((run.directory / "notes").iterdir())
    assert [path.read_text() for path in notes] == ["hello", "hello"]


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
    assert caught.value.step in map(step_of, checkpoints(hidden / "stopped" / "checkpoints"))
    assert not processes_of(hidden / "stopped")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the client's own is untouched
