"""CLUSTER=tcp://… and tls://…: a scheduler of somebody else's, which stays when we leave."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import psutil
import pytest
from distributed import Client
from distributed.security import Security
from patience import PATIENCE
from processes import Background, log_of, separate_cluster, wait_until

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]


def refusal(address):
    """What `connect` says of an address."""
    with pytest.raises(ddp.Error) as caught:
        ddp.connect(address).close()
    return str(caught.value)


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory):
    """(address, Dask's own variables for a client) of a scheduler with TLS and one worker."""
    folder = tmp_path_factory.mktemp("tls")
    made = Security.temporary()
    (folder / "cert.pem").write_text(made.tls_ca_file)
    (folder / "key.pem").write_text(made.tls_worker_key)
    words = "--tls-ca-file cert.pem --tls-cert cert.pem --tls-key key.pem"
    credentials = [str(folder / word) if ".pem" in word else word for word in words.split()]
    prefix = "DASK_DISTRIBUTED__COMM__TLS__"
    variables = {
        f"{prefix}CA_FILE": "cert.pem",
        f"{prefix}CLIENT__CERT": "cert.pem",
        f"{prefix}CLIENT__KEY": "key.pem",
    }
    words = ["--protocol", "tls", *credentials]
    with separate_cluster(folder, workers=1, words=words) as (_, address):
        yield address, {name: str(folder / value) for name, value in variables.items()}


def test_tls_without_credentials_names_the_variables_that_hold_them(over_tls):
    address, _ = over_tls
    assert "DASK_DISTRIBUTED__COMM__TLS__CA_FILE" in refusal(address)


def test_tls_with_dasks_own_variables_trains(over_tls, tmp_path):
    address, variables = over_tls
    program = (
        "import ddp_common as ddp\n"
        "with ddp.connect() as client:\n"
        "    print(ddp.launch(client, ddp.world_size).result, client.scheduler.address)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **variables, "CLUSTER": address},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, f"1 {address}\n"), done.stderr


def what_is_there(dask_scheduler):
    """On a scheduler: plugins, attributes, and how many messages it keeps of each attempt."""
    topics = dask_scheduler._broker._topics
    kept = [len(topics[name].events) for name in topics if name.startswith("ddp-")]
    return sorted(dask_scheduler.plugins), sorted(vars(dask_scheduler)), kept


def save_some(gate):
    for number in range(20):
        ddp.save_file(f"{number}.bin", bytes(2**20))
    print("saved", flush=True)
    wait_until(gate.exists)


def test_a_scheduler_of_others_is_left_as_it_was_found(tmp_path):
    """Also by several launches at once: it keeps nothing of what their ranks have sent."""
    with separate_cluster(tmp_path) as (_, address), Client(address) as client:
        client.wait_for_workers(2, timeout=2 * PATIENCE)
        found = client.run_on_scheduler(what_is_there)
        mine = sorted(vars(client)), sorted(client._event_handlers)
        both = [
            Background(
                ddp.launch,
                client,
                save_some,
                workers=1,
                directory=tmp_path / name,
                gate=tmp_path / f"gate-{name}",
            )
            for name in "ab"
        ]
        wait_until(lambda: all("saved" in log_of(tmp_path / name) for name in "ab"))
        assert client.run_on_scheduler(what_is_there)[2] == [0, 0], "messages that it keeps"
        (tmp_path / "gate-a").touch()
        both[0].outcome()
        with pytest.raises(ddp.Error, match="of which 1 run other launches"):
            ddp.launch(client, ddp.rank, workers=2, timeout=0.2)
        (tmp_path / "gate-b").touch()
        both[1].outcome()
        assert client.run_on_scheduler(what_is_there) == found
        wait_until(lambda: (sorted(vars(client)), sorted(client._event_handlers)) == mine)


def what_a_worker_has(dask_worker):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    filters = len(logging.getLogger("distributed.worker").filters)
    processes = [each.name() for each in psutil.Process().children()]
    return sorted(dask_worker.plugins), [*map(str, handlers)], filters, processes


def test_workers_of_others_are_left_as_they_were_found_by_the_last_that_needs_them(tmp_path):
    with separate_cluster(tmp_path) as (_, address), Client(address) as client:
        client.wait_for_workers(2, timeout=2 * PATIENCE)
        found = client.run(what_a_worker_has)
        with ddp.connect(address, workers=1):
            gate = tmp_path / "gate"
            running = Background(
                ddp.launch, client, save_some, workers=1, directory=tmp_path / "run", gate=gate
            )
            wait_until(lambda: "started" in log_of(tmp_path / "run"))
        in_use = client.run(what_a_worker_has)
        assert all("ddp-preload" in plugins for plugins, *_ in in_use.values())
        assert all(filters == 0 for *_, filters, _ in in_use.values())
        gate.touch()
        running.outcome()
        with ddp.connect(address, workers=2):
            with ddp.connect(address, workers=1):
                pass
            assert client.run(what_a_worker_has) == in_use
        assert client.run(what_a_worker_has) == found


WITHOUT_PACKAGE = """
import sys
from distributed.cli.dask_scheduler import main

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in ("ddp_common", "dask_ranks"):
            raise ModuleNotFoundError("No module named 'ddp_common'")

sys.meta_path.insert(0, Hidden())
main()
"""


def test_a_scheduler_without_this_package_is_refused_with_what_to_do(tmp_path):
    cluster = separate_cluster(tmp_path, workers=0, scheduler=["-c", WITHOUT_PACKAGE])
    with cluster as (_, address), Client(address) as client:
        with pytest.raises(ddp.Error, match="or the scheduler, have no ddp_common"):
            ddp.launch(client, ddp.rank)
