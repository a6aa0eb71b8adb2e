"""CLUSTER=tcp://… and tls://…: a scheduler of somebody else's, which stays when we leave."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import cloudpickle
import pytest
from distributed import Client
from distributed.security import Security
from fault_lab import separate_cluster
from processes import PATIENCE, Background, held_back, log_of, wait_until

import ddp_common as ddp
from ddp_common.clusters import at_address
from ddp_common.teaching import faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """That of a scheduler with three workers."""
    with separate_cluster(tmp_path_factory.mktemp("cluster"), workers=3) as (_, address):
        wait_until(lambda: workers_at(address) == 3)
        yield address


def workers_at(address):
    with Client(address, set_as_default=False) as client:
        return len(client.scheduler_info(n_workers=-1)["workers"])


def refusal(address):
    """What `connect` says of an address, and that it says so in time."""
    began = time.monotonic()
    with pytest.raises(ddp.Error) as caught:
        ddp.connect(address).close()
    assert time.monotonic() - began < PATIENCE
    return str(caught.value)


def test_without_workers_all_that_are_there_train_and_closing_leaves_them_there(
    address, monkeypatch
):
    monkeypatch.setenv("CLUSTER", address)
    with ddp.connect() as client:
        run = ddp.launch(client, ddp.world_size)
    assert (run.result, run.world_size) == (3, 3)
    assert workers_at(address) == 3


def test_fewer_workers_may_be_asked_for_and_the_others_stay(address, monkeypatch):
    monkeypatch.setenv("CLUSTER", address)
    monkeypatch.setenv("WORKERS", "2")
    with ddp.connect() as client:
        assert client.ranks == 2
        run = ddp.launch(client, ddp.world_size)
    assert (run.result, run.world_size) == (2, 2)
    assert workers_at(address) == 3


def test_a_second_client_that_comes_and_goes_leaves_the_ranks_of_the_first_alone(
    address, tmp_path
):
    with ddp.connect(address, workers=2) as first:
        with held_back(faults.train, tmp_path / "gate") as train:
            training = Background(ddp.launch, first, train, directory=tmp_path / "first")
            wait_until(lambda: log_of(tmp_path / "first").count("started") == 2)
            with ddp.connect(address, workers=1) as second:
                assert ddp.launch(second, ddp.world_size).result == 1  # on the one that is left
            assert training.is_running()
        assert not training.outcome().failures


def test_more_workers_than_come_are_an_error_that_names_both_numbers(address, monkeypatch):
    monkeypatch.setenv("WORKERS", "4")
    monkeypatch.setenv("OPTIONS", "timeout=0.5")
    message = refusal(address)
    assert "3 of 4 workers came within 0.5 s" in message
    assert "WORKERS=3" in message and "dask worker tcp://" in message


@pytest.fixture
def impatient(monkeypatch):
    """A scheduler has two seconds to answer, not ten."""
    monkeypatch.setattr(at_address, "ANSWER_TIMEOUT", 2)


@pytest.mark.parametrize(
    ("where", "reason"),
    {
        "wrong_port": ("tcp://127.0.0.1:9", "refused|Timed out"),
        "unknown_host": ("tcp://no-such-host.invalid:8786", "not known|resolution|Timed out"),
        "no_port": ("tcp://127.0.0.1", "missing port number"),
        "port_is_a_word": ("tcp://127.0.0.1:abc", "invalid literal for int"),
        "other_protocol": ("http://127.0.0.1:8786", "unknown address scheme 'http'"),
    }.values(),
    ids=["wrong_port", "unknown_host", "no_port", "port_is_a_word", "other_protocol"],
)
def test_an_address_without_a_scheduler_is_one_error_that_says_why(
    where, reason, impatient, capfd
):
    message = refusal(where)
    assert f"CLUSTER={where}: no Dask scheduler could be reached" in message
    assert "\n" not in message
    assert re.search(reason, message) and "Is it running, is the port right" in message
    assert not capfd.readouterr().err


def test_a_port_that_takes_connections_and_says_nothing_is_an_error(impatient):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert "no answer within 2 s" in refusal(f"tcp://127.0.0.1:{deaf.getsockname()[1]}")


def test_the_port_of_a_web_server_such_as_the_dashboard_is_an_error(impatient):
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        message = refusal(f"tcp://127.0.0.1:{web.server_port}")
        assert "no Dask scheduler could be reached" in message
        web.shutdown()


def test_a_scheduler_without_workers_is_said_to_have_none(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIONS", "timeout=1")
    with separate_cluster(tmp_path, workers=0) as (_, empty):
        message = refusal(empty)
    assert message == (
        f"0 of 1 workers came within 1 s. Start them with `dask worker {empty}`, "
        'wait longer (OPTIONS="timeout=3600").'
    )


def test_other_options_are_of_no_use_at_an_address(monkeypatch):
    monkeypatch.setenv("OPTIONS", "queue=gpu")
    assert "only timeout=" in refusal("tcp://127.0.0.1:9")


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory):
    """(address, Dask's own variables for a client) of a scheduler with TLS and one worker."""
    folder = tmp_path_factory.mktemp("tls")
    made = Security.temporary()
    (folder / "cert.pem").write_text(made.tls_ca_file)
    (folder / "key.pem").write_text(made.tls_worker_key)
    credentials = [
        "--tls-ca-file",
        folder / "cert.pem",
        "--tls-cert",
        folder / "cert.pem",
        "--tls-key",
        folder / "key.pem",
    ]
    prefix = "DASK_DISTRIBUTED__COMM__TLS__"
    variables = {
        f"{prefix}CA_FILE": "cert.pem",
        f"{prefix}CLIENT__CERT": "cert.pem",
        f"{prefix}CLIENT__KEY": "key.pem",
    }
    dask = [sys.executable, "-m", "dask"]
    file = folder / "scheduler.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [
        subprocess.Popen(
            [
                *dask,
                "scheduler",
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--protocol",
                "tls",
                "--dashboard-address",
                "127.0.0.1:0",
                "--scheduler-file",
                file,
                *credentials,
            ],
            **quiet,
        )
    ]
    try:
        wait_until(lambda: file.exists() and file.read_text().endswith("}"))
        processes.append(
            subprocess.Popen(
                [
                    *dask,
                    "worker",
                    "--scheduler-file",
                    file,
                    "--nthreads",
                    "1",
                    "--no-dashboard",
                    "--local-directory",
                    folder,
                    *credentials,
                ],
                **quiet,
            )
        )
        yield (
            json.loads(file.read_text())["address"],
            {name: str(folder / value) for name, value in variables.items()},
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_scheduler_that_speaks_tls_does_not_answer_to_tcp(over_tls):
    address, _ = over_tls
    assert "no Dask scheduler could be reached" in refusal(address.replace("tls://", "tcp://"))


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
    )
    assert (done.returncode, done.stdout) == (0, f"1 {address}\n"), done.stderr


def test_a_worker_with_other_source_of_this_package_is_refused_by_name(tmp_path):
    shutil.copytree(ROOT / "ddp_common", tmp_path / "changed" / "ddp_common")
    with open(tmp_path / "changed" / "ddp_common" / "ranks" / "sampling.py", "a") as file:
        file.write("\n# changed\n")
    there = ["sh", "-c", f'cd {tmp_path} && PYTHONPATH={tmp_path / "changed"} exec "$@"', "sh"]
    with separate_cluster(tmp_path, *there, workers=1) as (_, address):
        message = refusal(address)
    assert "The worker at tcp://127.0.0.1:" in message
    assert "ddp_common" in message and "instead of" in message
    assert "python" not in message.split(". ")[0]  # that one agrees
    assert "use one environment for both" in message
