"""What another user of this host can do to a local cluster: nothing.

Each test really is another user; it needs root to become one.
"""

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client, LocalCluster

import ddp_common as ddp
from ddp_common.clusters import protection

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")

# Imports first, as root: the folder of this repository may be closed to others. Then it is another
# user for good.
STRANGER = f"""
import asyncio, json, os, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
from distributed.comm import connect
from distributed.security import Security

os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})


async def greeted(address, security):
    arguments = security.get_connection_args("client")
    try:
        comm = await asyncio.wait_for(connect(address, timeout=2, **arguments), 5)
    except Exception:
        return False
    comm.abort()
    return True


def page(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return "" if error.code == 404 else "status %d" % error.code
    except OSError:
        return ""


async def greeted_at(port):
    by_tcp = greeted("tcp://127.0.0.1:%d" % port, Security())
    by_tls = greeted("tls://127.0.0.1:%d" % port, own)
    return any(await asyncio.gather(by_tcp, by_tls))


async def all_greetings():
    return await asyncio.gather(*map(greeted_at, ports))


ports, paths = json.loads(sys.argv[1])
own = Security.temporary()
urls = ["http://127.0.0.1:%d%s" % (port, path) for port in ports for path in paths]
with ThreadPoolExecutor(40) as pool:
    shown = dict(zip(urls, pool.map(page, urls)))
print(json.dumps({{
    "user": os.getuid(),
    "greeted": [port for port, answer in zip(ports, asyncio.run(all_greetings())) if answer],
    "shown": {{url: text for url, text in shown.items() if text}},
}}))
"""

PAGES = [
    "/",
    "/status",
    "/info",
    "/info/main/workers.html",
    "/info/main/logs.html",
    "/info/main/exceptions.html",
    "/json/identity.json",
    "/json/counts.json",
    "/individual-plots.json",
    "/individual-task-stream",
    "/sitemap.json",
    "/health",
    "/metrics",
    "/workers",
    "/graph",
    "/eventstream",
    "/statics/css/base.css",
    "/static/js/bokeh.min.js",
    "/api/v1/get_workers",
    "/proxy/22/127.0.0.1/",
    "/%s/status",
]


def listening(client):
    """The TCP ports on which the client, its scheduler, its nannies and its workers listen."""
    workers = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
    processes = [psutil.Process(), *workers]
    ports = {
        each.laddr.port
        for process in processes
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert len(ports) >= 1 + 3 * len(workers)  # scheduler; nanny, worker and its web server
    return sorted(ports)


def stranger_at(ports, paths=PAGES):
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, json.dumps([ports, paths])],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["user"] == NOBODY
    return found


@pytest.fixture(scope="module")
def local():
    with ddp.connect("local", workers=2) as client:
        yield client


@pytest.fixture(scope="module")
def found(local):
    return stranger_at(listening(local))


def test_another_user_connects_to_a_cluster_without_protection():
    with LocalCluster(n_workers=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        ports = listening(client)
        scheduler = int(cluster.scheduler_address.rpartition(":")[2])
        assert scheduler in ports
        assert scheduler in stranger_at(ports, paths=[])["greeted"]


def test_another_user_of_the_host_connects_to_no_port_of_a_local_cluster(found):
    assert found["greeted"] == []


def test_another_user_reads_no_page_of_a_local_cluster_without_the_link(found):
    empty = {"paths": ["/sitemap.json"]}
    shown = found["shown"].items()
    assert {path: text for path, text in shown if json.loads(text or "0") != empty} == {}


def test_who_has_the_link_reads_the_dashboard(local):
    link = local.dashboard_link
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/status", link)
    pages = {
        "status": "<html",
        "info/main/workers.html": "tls://127.0.0.1",
        "json/identity.json": "workers",
        "health": "ok",
    }
    for page, content in pages.items():
        with urllib.request.urlopen(link.replace("status", page)) as answer:
            assert content in answer.read().decode()


def test_without_the_secret_a_page_that_is_there_and_one_that_is_not_look_the_same(local):
    root = re.match(r"http://[^/]*", local.dashboard_link)[0]
    answers = set()
    wrong_secrets = ("/" + "x" * 22 + "/status", "/%C3%A4/status")
    for page in ("/", "/status", "/sitemap.json", "/no-such-page", *wrong_secrets):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(root + page)
        answers.add((refused.value.code, refused.value.read()))
    assert len(answers) == 1 and answers.pop()[0] == 404


def test_two_clusters_have_different_secrets(local):
    with ddp.connect("local", workers=1) as other:
        assert other.dashboard_link.split("/")[3] != local.dashboard_link.split("/")[3]
        assert other.security.tls_client_key != local.security.tls_client_key
        with pytest.raises(OSError):
            Client(other.scheduler.address, security=local.security, timeout=3)


def test_a_second_client_of_the_same_program_connects_with_the_security_of_the_first(local):
    with Client(local.scheduler.address, security=local.security, set_as_default=False) as second:
        assert second.submit(sum, [1, 2]).result() == 3


def test_the_key_is_no_argument_or_variable_of_any_process_and_in_no_file(local, tmp_path):
    key = local.security.tls_client_key.splitlines()[1].encode()
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    read = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            for file in ("cmdline", "environ"):
                assert key not in Path(f"/proc/{pid}/{file}").read_bytes()
                read += 1
    assert read > 4  # this process, the workers and what they have started


def test_folders_and_files_of_a_local_cluster_are_closed_to_others(local):
    def is_closed(path):
        return path.stat().st_mode & 0o077 == 0 and path.stat().st_uid == os.getuid()

    folders = local.run(lambda dask_worker: dask_worker.local_directory).values()
    sockets = local.run(lambda: __import__("multiprocessing").util.get_temp_dir()).values()
    for path in map(Path, {*folders, *sockets}):
        assert any(is_closed(each) for each in (path, *path.parents[:2])), path


def test_a_folder_that_somebody_else_has_made_is_no_place_for_temporary_files_and_modules(
    tmp_path, monkeypatch
):
    tmp_path.chmod(0o777)
    traps = [tmp_path / "dask-scratch-space", tmp_path / f"ddp-{os.getuid()}"]
    for trap in traps:
        trap.mkdir()
        trap.chmod(0o777)
        os.chown(trap, NOBODY, NOBODY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ddp.connect("local", workers=1) as client:
        (of_worker,) = client.run(lambda: __import__("sys").path).values()
        paths = [Path(path) for path in [*sys.path, *of_worker]]
        assert not [path for path in paths if {path, *path.parents} & set(traps)]
    assert not [file for trap in traps for file in trap.iterdir()]


def test_an_own_scratch_folder_that_was_open_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"ddp-{os.getuid()}").mkdir(mode=0o755)
    folder = protection.private_folder()
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700 and folder == protection.private_folder()


def test_the_temporary_directory_of_dasks_own_settings_is_respected(tmp_path):
    with (
        dask.config.set({"temporary-directory": str(tmp_path)}),
        ddp.connect("local", workers=1) as client,
    ):
        (folder,) = client.run(lambda dask_worker: dask_worker.local_directory).values()
    assert tmp_path in Path(folder).parents


@pytest.mark.parametrize("options", ["security=false", "protocol=tcp"])
def test_plain_tcp_is_there_for_who_asks_for_it(monkeypatch, options):
    monkeypatch.setenv("OPTIONS", options)
    with ddp.connect("local", workers=1) as client:
        assert client.scheduler.address.startswith("tcp://")
        assert ddp.launch(client, ddp.world_size).result == 1


def test_dasks_own_settings_of_tls_do_not_reach_a_local_cluster():
    """They are for clusters of somebody else's, with ciphers and files that would not fit ours."""
    theirs = {
        "distributed.comm.require-encryption": True,
        "distributed.comm.tls.ciphers": "AES256-SHA",
        "distributed.comm.tls.max-version": 1.2,
        "distributed.comm.tls.ca-file": "/no/such/file",
        "distributed.comm.tls.worker.cert": "/no/such/file",
    }
    with dask.config.set(theirs), ddp.connect("local", workers=1) as client:
        assert ddp.launch(client, ddp.world_size).result == 1
