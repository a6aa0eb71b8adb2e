"""Workers that cannot see the run directory.

Their checkpoints reach the client all the same, and come back to them for a restart. The workers
run in a mount namespace of their own, where something else lies over the run directory.
"""

import os
import sys

import cloudpickle
import faults_on_purpose as faults
import pytest
import torch
from distributed import Client
from patience import PATIENCE
from processes import can_hide, hiding, saved_steps, separate_cluster

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


pytestmark = pytest.mark.skipif(
    not can_hide(), reason="needs the right to make a mount namespace (root)"
)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A client of two workers, and a folder of its own that they see empty and cannot write."""
    folder, hidden = tmp_path_factory.mktemp("cluster"), tmp_path_factory.mktemp("hidden")
    with separate_cluster(folder, *hiding(hidden)) as (_, address), Client(address) as client:
        client.wait_for_workers(2, timeout=2 * PATIENCE)
        yield client, hidden


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
