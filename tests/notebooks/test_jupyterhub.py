"""What a JupyterHub needs: the kernel that `make kernel` makes, and the dashboard through a proxy.

The servers are real ones with jupyter-server-proxy, each with a path and a token, as a Hub starts
one for each of its users. There is no Hub.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urljoin

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from patience import PATIENCE
from ports import free_port
from processes import wait_until
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect
from tutorials_here import ROOT, copy_of_repository

PAGE = (ROOT / "docs" / "jupyterhub.md").read_text()
(LINK,) = re.findall(r'"DASK_DISTRIBUTED__DASHBOARD__LINK": "(.*?)"', PAGE)
USERS = ("somebody", "another")


def path_of(user):
    return f"/user/{user}/"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def made(folder):
    """What `make kernel` has left: the clone, the kernel's name, the environment of the Hub."""
    clone = copy_of_repository(folder)
    of_make = {"MAKELEVEL", "MAKEFLAGS", "MFLAGS"}  # of `make test-all`: it would say more here
    left_out = of_make | {"PYTHONPATH"}
    hub = {name: value for name, value in os.environ.items() if name not in left_out}
    hub |= {
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTERHUB_SERVICE_PREFIX": path_of("somebody"),
        "DASK_DISTRIBUTED__DASHBOARD__LINK": LINK,
    }
    make = ["make", "kernel"]
    done = subprocess.run(make, cwd=clone, env=hub, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (kernel,) = (folder / "data" / "kernels").iterdir()
    return SimpleNamespace(clone=clone, kernel=kernel, hub=hub, said=done.stdout)


def test_the_notebooks_of_the_clone_name_its_kernel_also_after_make_lab(made):
    program = "from tutorials import lab; print(*lab.my_copies(), sep='')"
    again = [sys.executable, "-c", program]  # as `make lab` does
    done = subprocess.run(again, cwd=made.clone, env=made.hub, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")
    copies = sorted((made.clone / "tutorials" / "my-work").glob("*.ipynb"))
    named = {nbformat.read(path, 4).metadata.kernelspec.name for path in copies}
    assert len(copies) == 8 and named == {made.kernel.name}


def test_the_line_for_terminals_leads_to_the_clone_and_the_environment(made):
    shown = f'{made.said.splitlines()[-1]}; command -v python; cd "$JUPYTER_SERVER_ROOT/.."; pwd'
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, cwd="/")
    assert done.stdout.splitlines() == [sys.executable, str(made.clone)]


def test_a_folder_that_is_not_the_users_is_said_in_a_sentence(made, tmp_path):
    (tmp_path / "file").touch()
    environment = made.hub | {"JUPYTER_DATA_DIR": str(tmp_path / "file")}
    done = subprocess.run(
        ["make", "kernel"], cwd=made.clone, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert f"cannot be put into {tmp_path}/file/kernels" in done.stderr


@pytest.fixture(scope="module")
def notebook(made, folder):
    """A function that executes a cell in the kernel, and returns what it has printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", made.hub["JUPYTER_DATA_DIR"])
        manager, client = start_new_kernel(
            startup_timeout=2 * PATIENCE,
            kernel_name=made.kernel.name,
            env=made.hub,
            cwd=str(folder),
        )

    def executed(code):
        said = []

        def listen(message):
            if message["content"].get("name") == "stdout":
                said.append(message["content"]["text"])

        reply = client.execute_interactive(code, timeout=4 * PATIENCE, output_hook=listen)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(said).strip()

    yield executed
    client.stop_channels()
    manager.shutdown_kernel()


def test_a_kernel_in_another_folder_has_the_modules_of_the_clone_and_its_programs(made, notebook):
    modules = "import ddp_common, dask_ranks, tutorials"
    files = notebook(f"{modules}\nprint(ddp_common.__file__, dask_ranks.__file__, sep='\\n')")
    assert [Path(file).parents[1] for file in files.splitlines()] == [made.clone] * 2
    path, prefix = notebook(
        "import os, sys\nprint(os.environ['PATH'], sys.prefix, sep='\\n')"
    ).split("\n")
    assert path == f"{Path(sys.executable).parent}{os.pathsep}{made.hub['PATH']}"
    assert prefix == sys.prefix


@pytest.fixture(scope="module")
def servers(made, folder):
    """The addresses of two users' servers, without the path, by the names of the users."""
    processes, addresses = [], {}
    for user in USERS:
        port = free_port()
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": port,
            "ServerApp.port_retries": 0,
            "ServerApp.base_url": path_of(user),
            "ServerApp.root_dir": folder,
            "ServerApp.open_browser": False,
            "ServerApp.allow_root": True,
            "IdentityProvider.token": f"token-of-{user}",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        own = {f"JUPYTER_{kind}_DIR": f"{folder}/{user}" for kind in ("CONFIG", "RUNTIME")}
        with (folder / f"{user}.log").open("w") as log:
            command = [sys.executable, "-m", "jupyter_server", *words]
            processes.append(
                subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
            )
        addresses[user] = f"http://127.0.0.1:{port}"
    for user in USERS:
        wait_until(lambda: listens(addresses[user] + path_of(user) + "api"))
    yield addresses
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def listens(url):
    try:
        return bool(urllib.request.urlopen(url).read())
    except urllib.error.URLError:
        return False


@pytest.fixture(scope="module")
def link(notebook):
    """What `client.dashboard_link` says in a notebook; `connect` says the same."""
    said = notebook(
        "import ddp_common as ddp\nclient = ddp.connect(workers=1)\nprint(client.dashboard_link)"
    )
    told, link = said.splitlines()
    assert told == f"Dask's dashboard: {link}"
    yield link
    notebook("client.close()")


def page(servers, path, user="somebody", token=True):
    """The status, the address and the text of a page of a user's server, as a browser gets it."""
    headers = {"Authorization": f"token token-of-{user}"} if token else {}
    request = urllib.request.Request(servers[user] + path, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.url, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.url, error.read().decode(errors="replace")


def test_the_link_leads_through_the_proxy_to_a_page_that_is_whole(servers, link):
    assert re.fullmatch(r"/user/somebody/proxy/\d+/[\w-]{20,}/status", link)
    status, address, text = page(servers, link)
    assert status == 200 and "Dask" in text
    loaded = re.findall(r'(?:<script src|<link [^>]*href|<img src)="([^"]+)"', text)
    assert any("bokeh.min.js" in each for each in loaded)
    for each in loaded:
        path = urljoin(address, each).removeprefix(servers["somebody"])
        assert page(servers, path)[0] == 200, each
    assert "tls://127.0.0.1" in page(servers, link.replace("status", "info/main/workers.html"))[2]


def test_the_pages_pictures_are_sent_through_the_proxy(servers, link):
    _, address, text = page(servers, link)
    (token,) = re.findall(r'"token":"([^"]+)"', text)

    async def first_message():
        socket = await websocket_connect(
            HTTPRequest(
                address.replace("http", "ws", 1) + "/ws",
                headers={"Authorization": "token token-of-somebody"},
            ),
            subprotocols=["bokeh", token],
        )
        message = await asyncio.wait_for(socket.read_message(), PATIENCE)
        socket.close()
        return json.loads(message)["msgtype"]

    assert asyncio.run(first_message()) == "ACK"


def test_without_the_secret_or_without_a_login_nobody_sees_the_dashboard(servers, link):
    without_secret = re.sub(r"(/proxy/\d+)/[\w-]+/", r"\1/", link)
    wrong_secret = re.sub(r"(/proxy/\d+)/[\w-]+/", r"\1/wrong/", link)
    of_another = without_secret.replace("/somebody/", "/another/")
    assert page(servers, without_secret)[0] == page(servers, wrong_secret)[0] == 404
    assert page(servers, of_another, "another")[0] == 404
    for path in (link, without_secret):
        status, address, text = page(servers, path, token=False)
        assert "/login" in address and "Dask" not in text, status


def test_whoever_has_the_secret_sees_it_by_any_server_of_the_host(servers, link):
    """Users of one host share 127.0.0.1: the secret is what protects, so the test before says."""
    of_another = link.replace("/somebody/", "/another/")
    assert page(servers, of_another, "another")[0] == 200
