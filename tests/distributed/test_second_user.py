"""What another user of this host can do to a local cluster, and to a shared run: nothing.

Each test really is another user; it needs root to become one.
"""

import contextlib
import getpass
import json
import os
import re
import tempfile
import urllib.error
import urllib.request

import dask
import psutil
import pytest
import torch
from distributed import LocalCluster
from patience import PATIENCE
from processes import finished

import ddp_common as ddp
from dask_ranks.run.run_directory import RunDirectory
from ddp_common.checkpoint import finish_writing

NOBODY, GROUP = 65534, 54321
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
# Imports first, as root: the folder of this repository may be closed to others. Then it is another
# user for good.
STRANGER = f"""
import asyncio, http.client, json, os, socket, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
from distributed.comm import connect
from distributed.security import Security

os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})


async def greeted(address, security):
    arguments = security.get_connection_args("client")
    attempt = connect(address, timeout={PATIENCE / 20}, **arguments)
    try:
        comm = await asyncio.wait_for(attempt, {PATIENCE / 10})
    except Exception:  # of any kind: it was not let in
        return False
    comm.abort()
    return True


def page(url):
    try:
        with urllib.request.urlopen(url, timeout={PATIENCE / 10}) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return "" if error.code == 404 else "status %d" % error.code
    except (OSError, http.client.HTTPException):  # the latter of what speaks, but not HTTP
        return ""


async def greeted_at(port):
    by_tcp = greeted("tcp://127.0.0.1:%d" % port, Security())
    by_tls = greeted("tls://127.0.0.1:%d" % port, own)
    return any(await asyncio.gather(by_tcp, by_tls))


async def all_greetings():
    return await asyncio.gather(*map(greeted_at, ports))


def forks_for_me(path):
    try:
        socket.socket(socket.AF_UNIX).connect(path)
    except PermissionError:
        return False
    return True


ports, paths, fork_server = json.loads(sys.argv[1])
own = Security.temporary()
urls = ["http://127.0.0.1:%d%s" % (port, path) for port in ports for path in paths]
with ThreadPoolExecutor(40) as pool:
    shown = dict(zip(urls, pool.map(page, urls)))
print(json.dumps({{
    "user": os.getuid(),
    "forks": forks_for_me(fork_server),
    "greeted": [port for port, answer in zip(ports, asyncio.run(all_greetings())) if answer],
    "shown": {{url: text for url, text in shown.items() if text}},
}}))
"""
PAGES = [
    "/status",
    "/info/main/workers.html",
    "/json/identity.json",
    "/individual-task-stream",
    "/sitemap.json",
    "/health",
    "/metrics",
    "/proxy/22/127.0.0.1/",
]


MEMBER = f"""
import json, os, pathlib, sys
os.setgroups([{GROUP}])
os.setuid({NOBODY})
for mode in (os.R_OK, os.W_OK):
    found = [each for each in pathlib.Path(sys.argv[1]).rglob("*") if os.access(each, mode)]
    print(json.dumps(sorted(each.name for each in found)))
"""

TRAINS = """
import torch, ddp_common as ddp
def train():
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
with ddp.connect(workers=1) as client:
    ddp.launch(client, train, directory=False)
"""


def ports_of(client):
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


def stranger_at(ports, fork_server):
    words = json.dumps([ports, PAGES, fork_server])
    found = json.loads(finished("-c", STRANGER, words).stdout)
    assert found["user"] == NOBODY
    return found


@pytest.fixture(scope="module")
def found(client):
    """What a stranger finds there, and at the port of a scheduler without protection."""
    protected = ports_of(client)
    with LocalCluster(n_workers=0, dashboard_address=":0") as open_to_all:
        unprotected = int(open_to_all.scheduler_address.rpartition(":")[2])
        seen = stranger_at([unprotected, *protected], client.fork_server.path)
        return {"unprotected": unprotected, **seen}


def test_another_user_of_the_host_connects_to_no_port_of_a_local_cluster(found):
    assert found["greeted"] == [found["unprotected"]]


def test_another_user_does_not_reach_the_process_that_forks_ranks(found):
    assert found["forks"] is False


def test_another_user_reads_no_page_of_a_local_cluster_without_the_link(found):
    empty = {"paths": ["/sitemap.json"]}
    shown = found["shown"].items()
    assert {path: text for path, text in shown if json.loads(text or "0") != empty} == {}


def test_who_has_the_link_reads_the_dashboard(client):
    link = client.dashboard_link
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/status", link)
    pages = {
        "status": "<html",
        "info/main/workers.html": "tls://127.0.0.1",
        # not identity.json, which answers 500 while a worker's metrics have a tuple for a key
        "json/counts.json": "workers",
        "health": "ok",
    }
    for page, content in pages.items():
        with urllib.request.urlopen(link.replace("status", page)) as answer:
            assert content in answer.read().decode()


def test_a_link_through_a_proxy_has_the_secret_behind_the_port(client):
    direct = client.dashboard_link.rpartition(":")[2]
    with dask.config.set({"distributed.dashboard.link": "/user/me/proxy/{port}/status"}):
        assert client.dashboard_link == f"/user/me/proxy/{direct}"


def test_a_group_reads_a_run_that_is_shared_with_it_and_writes_nothing_there(monkeypatch):
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_the_end:
        os.chown(folder, 0, GROUP)
        os.chmod(folder, 0o2750)
        at_the_end.callback(os.umask, os.umask(0o002))
        run = RunDirectory(folder)
        run.save("a/b/c.txt", b"")
        monkeypatch.setenv("DDP_CHECKPOINTS", f"{folder}/checkpoints")
        ddp.Checkpoint(directory="best", model=torch.nn.Linear(1, 1)).save()
        finish_writing()
        run.close()
        readable, writable = map(json.loads, finished("-c", MEMBER, folder).stdout.splitlines())
        names = ["a", "b", "best", "c.txt", "checkpoints", "log.txt", "metrics.jsonl"]
        assert readable[:-1] == names and readable[-1].startswith("step-")
        assert writable == []


def test_a_file_where_torch_has_its_cache_by_default_is_in_nobodys_way(tmp_path):
    (tmp_path / f"torchinductor_{getpass.getuser()}").touch()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    finished("-c", TRAINS, env=environment)
