"""`connect` in a notebook, whose cells people run again, and where it says what on the screen."""

import os
import subprocess
import sys

import pytest
from kernels import kernel_manager

CONNECT = "client = ddp.connect('local', workers={workers})"


class Notebook:
    """A kernel. Cells have names, as in JupyterLab: a cell that is edited stays the same cell."""

    def __init__(self):
        self.manager = kernel_manager()
        self.manager.start_kernel(env={**os.environ, "DDP_PROGRESS": "off"})
        self.kernel = self.manager.blocking_client()
        self.kernel.start_channels()
        self.kernel.wait_for_ready(timeout=120)

    def run(self, cell, code):
        """Run a cell; what it has printed."""
        message = self.kernel.session.msg(
            "execute_request",
            {
                "code": code,
                "silent": False,
                "store_history": True,
                "user_expressions": {},
                "allow_stdin": False,
                "stop_on_error": True,
            },
            metadata={"cellId": cell},
        )
        self.kernel.shell_channel.send(message)
        text = ""
        while True:
            said = self.kernel.get_iopub_msg(timeout=200)
            if said["parent_header"].get("msg_id") != message["header"]["msg_id"]:
                continue
            content = said["content"]
            text += (
                content.get("text", "")
                + "\n".join(content.get("traceback", []))
                + content.get("data", {}).get("text/html", "")
            )
            if content.get("execution_state") == "idle":
                return text

    def close(self):
        self.kernel.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook():
    notebook = Notebook()
    assert notebook.run("imports", "import ddp_common as ddp, psutil, threading, time") == ""
    yield notebook
    notebook.run("end", "client.close()")
    notebook.close()


WORKERS = (
    "print(sum('spawn_main' in ' '.join(each.cmdline()) for each in psutil.Process().children()))"
)


def test_a_cell_that_connects_and_is_run_again_goes_on_with_its_cluster(notebook):
    assert notebook.run("connect", CONNECT.format(workers=1)) == ""
    notebook.run("look", "first = client")
    assert "going on with its 1 workers" in notebook.run("connect", CONNECT.format(workers=1))
    assert notebook.run("look", f"print(client is first); {WORKERS}").split() == ["True", "1"]


def test_the_client_shows_its_ranks_and_where_the_dashboard_is(notebook):
    shown = notebook.run("show", "client")
    assert "1 rank(s)" in shown and "/status" in shown and "127.0.0.1" in shown


def test_another_cell_that_connects_is_told_of_the_cluster_that_is_open(notebook):
    assert "Another cluster of this notebook is open (1 workers, local)" in notebook.run(
        "two", "second = ddp.connect('local', workers=1)"
    )
    assert notebook.run("look", WORKERS).split() == ["2"]
    assert notebook.run("end of two", "second.close()") == ""


def test_two_clusters_that_one_cell_starts_on_purpose_both_stay(notebook):
    assert (
        notebook.run(
            "pair",
            "client.close(); "
            "client, other = ddp.connect('local', workers=1), ddp.connect('local', workers=1)",
        )
        == ""
    )
    assert notebook.run("look", "print(client.status, other.status); other.close()").split() == [
        "running",
        "running",
    ]
    notebook.run("end of pair", "client.close()")


def test_a_cell_that_is_changed_and_run_again_replaces_its_cluster_but_not_one_that_trains(
    notebook,
):
    assert notebook.run("connect", CONNECT.format(workers=1)) == ""
    assert "(1 workers) is closed first" in notebook.run("connect", CONNECT.format(workers=2))
    assert notebook.run("look", WORKERS).split() == ["2"]
    notebook.run(
        "train",
        "def train():\n    time.sleep(600)\n"
        "threading.Thread(target=ddp.launch, args=(client, train), daemon=True).start()\n"
        "while not client.__dict__.get('ddp_inboxes'): time.sleep(0.1)\ntraining = client",
    )
    assert "Another cluster of this notebook is open (2 workers" in notebook.run(
        "connect", CONNECT.format(workers=1)
    )
    assert notebook.run("look", "print(training.status)").split() == ["running"]
    notebook.run("end of training", "training.close()")


PROGRAM = (
    "import ddp_common as ddp\n"
    "with ddp.connect('local', workers=1) as client: print(client.dashboard_link)"
)


@pytest.mark.parametrize(("progress", "said"), [("bar", True), ("off", False), (None, False)])
def test_the_dashboards_address_is_said_where_somebody_watches(progress, said):
    environment = {**os.environ, **({"DDP_PROGRESS": progress} if progress else {})}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == (f"Dask's dashboard: {done.stdout}" if said else "")
