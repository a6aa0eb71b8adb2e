"""What a run shows in a notebook: one line that moves where a person watches.

Nothing where the notebook is executed to be kept. A front end with a person before it lets a cell
ask for input (`allow_stdin`); nbclient and nbval do not. The kernel is a real one.
"""

import re
import time

import nbformat
import pytest
from kernels import configuration, kernel_manager
from nbclient import NotebookClient

import ddp_common as ddp
from ddp_common.client.launch import Run

SETUP = """
import os
os.environ["WORKERS"] = "2"
import ddp_common as ddp
from ddp_common.teaching.faults import inject, train
client = ddp.connect()
ddp.launch(client, ddp.rank)
"""


class Kernel:
    def __init__(self):
        self.manager = kernel_manager()
        self.manager.start_kernel()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, code, watched=True):
        """The messages that a cell leaves, as (type, content).

        `watched`: sent by a front end such as JupyterLab, else by nbclient or nbval.
        """
        messages = []
        reply = self.client.execute_interactive(
            code,
            allow_stdin=watched,
            timeout=200,
            output_hook=lambda message: messages.append((message["msg_type"], message["content"])),
        )
        assert reply["content"]["status"] == "ok", reply["content"]
        return [
            (kind, content)
            for kind, content in messages
            if kind not in ("status", "execute_input")
        ]

    def interrupt_once(self, code, condition):
        """Send a cell, interrupt it when `condition` holds, and return its messages."""
        # a kernel that stops on an error drops what is sent in the moment after it
        sent = self.client.execute(code, allow_stdin=True, stop_on_error=False)
        messages = []
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.manager.interrupt_kernel()
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != sent:
                continue
            messages.append((message["msg_type"], message["content"]))
            if message["content"].get("execution_state") == "idle":
                return messages

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel()


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run(SETUP, watched=False)
    yield kernel
    kernel.run("client.close()", watched=False)
    kernel.close()


@pytest.fixture(autouse=True)
def runs_of_this_test(kernel, tmp_path):
    kernel.run(
        f"os.environ['RUNS'] = {str(tmp_path / 'runs')!r}\nos.environ.pop('DDP_PROGRESS', None)",
        watched=False,
    )


def said(messages):
    return "".join(content["text"] for kind, content in messages if kind == "stream")


LAUNCH = "run = ddp.launch(client, train, workers=2, pause=0.3)"


def test_where_a_person_watches_one_line_moves_and_a_tidy_one_remains(kernel):
    first, *updates = kernel.run(LAUNCH)
    assert first[0] == "display_data"
    # no stream: no pink box
    assert len(updates) >= 3 and {kind for kind, _ in updates} == {"update_display_data"}
    assert {content["transient"]["display_id"] for _, content in updates} == {
        first[1]["transient"]["display_id"]
    }
    moving, last = first[1]["data"], updates[-1][1]["data"]
    assert "<progress " in moving["text/html"] and moving["text/plain"].startswith("epoch 1/2 · ")
    assert re.fullmatch(
        r"2 epochs · 206 samples · \d\d:\d\d · [\d,]+ samples/s · loss \d+\.\d{4}",
        last["text/plain"],
    )
    assert "<progress" not in last["text/html"] and "\n" not in last["text/plain"]


def test_where_a_notebook_is_executed_to_be_kept_nothing_is_drawn(kernel):
    assert kernel.run(LAUNCH, watched=False) == []


PLOT = f"""
from ddp_common.teaching.live_plot import live_plot
with live_plot("loss") as watch:
    {LAUNCH.removesuffix(")")}, on_report=watch)
"""


def test_a_live_plot_is_one_picture_where_a_person_watches_and_nothing_elsewhere(kernel):
    assert kernel.run(PLOT, watched=False) == []
    pictures = [
        (kind, content["transient"]["display_id"], content["data"]["image/png"])
        for kind, content in kernel.run(PLOT)
        if "image/png" in content["data"]
    ]
    assert [kind for kind, _, _ in pictures[:2]] == ["display_data", "update_display_data"]
    assert {kind for kind, _, _ in pictures[1:]} == {"update_display_data"}
    assert len({place for _, place, _ in pictures}) == 1
    assert pictures[0][2] != pictures[-1][2]


@pytest.mark.parametrize("watched", [True, False])
def test_connect_says_where_the_dashboard_is_if_a_person_watches(kernel, watched):
    messages = kernel.run("with ddp.connect('local', workers=1) as one: pass", watched=watched)
    streams = [
        content["name"]
        for kind, content in messages
        if kind == "stream" and re.search(r"^Dask's dashboard: http\S+$", content["text"], re.M)
    ]
    assert streams == (["stdout"] if watched else [])  # stderr looks like an error there


def test_nbclient_keeps_no_trace_of_progress(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, LAUNCH, "client.close()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, resources=resources, config=configuration()).execute()
    assert notebook.cells[1].execution_count == 2 and notebook.cells[1].outputs == []


@pytest.mark.parametrize(
    "mode, watched, kinds",
    [
        ("off", True, set()),
        ("lines", True, {"stream"}),
        ("lines", False, {"stream"}),
        ("bar", False, {"display_data", "update_display_data"}),
    ],
)
def test_the_environment_has_the_last_word(kernel, mode, watched, kinds):
    kernel.run(f"os.environ['DDP_PROGRESS'] = {mode!r}", watched=False)
    messages = kernel.run(LAUNCH, watched)
    assert {kind for kind, _ in messages} == kinds
    if mode == "lines":
        assert re.findall(r"^epoch (\d/2)  loss", said(messages), flags=re.M) == ["1/2", "2/2"]


def test_a_restart_is_said_between_two_lines_and_not_on_stderr(kernel, tmp_path):
    mark = str(tmp_path / "mark")
    messages = kernel.run(
        f"killed = inject(train, 'SIGKILL', step=8, mark={mark!r})\n"
        "run = ddp.launch(client, killed, workers=2, restarts=1, pause=0.1)"
    )
    assert [kind for kind, _ in messages if kind != "update_display_data"] == [
        "display_data",
        "stream",
        "display_data",
    ]
    assert "Restart 1 on 2 rank(s) from step" in said(messages)
    assert {content.get("name") for kind, content in messages if kind == "stream"} == {"stdout"}
    before_the_stream = [
        content["data"]["text/plain"] for kind, content in messages if kind != "stream"
    ]
    assert any(text.startswith("ended in epoch ") for text in before_the_stream)


def test_an_interrupted_cell_says_where_it_stopped_and_how_to_go_on(kernel, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    directory = str(tmp_path / "run")
    waits = "inject(train, 'deadlock', step=8)"  # for the interrupt
    cell = f"ddp.launch(client, {waits}, workers=2, directory={directory!r})"
    messages = kernel.interrupt_once(cell, lambda: list(checkpoints.glob("*.pt")))
    assert re.search(
        r"Interrupted after step \d+. The newest checkpoint is that of step \d+. Go on from there",
        said(messages),
    )
    (error,) = [content for kind, content in messages if kind == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    assert "attempt.py" not in "".join(error["traceback"]) and len(error["traceback"]) <= 4
    hint = said(messages).splitlines()[1].strip()
    assert hint == f"ddp.launch(client, train, …, directory={directory!r})"
    kernel.run(f"on = {hint.replace('…', 'workers=2')}", watched=False)
    kernel.run(
        "assert (on.result == ddp.launch(client, train, workers=2).result).all()", watched=False
    )


def test_an_interrupt_before_the_first_checkpoint_says_so(kernel, tmp_path):
    def has_begun():
        metrics = tmp_path / "run" / "metrics.jsonl"
        return metrics.exists() and metrics.read_text()

    directory = str(tmp_path / "run")
    waits = "inject(train, 'deadlock', step=2)"  # for the interrupt; there is a save at step 3
    messages = kernel.interrupt_once(
        f"ddp.launch(client, {waits}, workers=2, directory={directory!r})", has_begun
    )
    words = f"There is no checkpoint to go on from; what there is lies in {directory}."
    assert words in said(messages)


def test_a_run_as_the_last_line_of_a_cell_is_short(kernel):
    ((kind, content),) = kernel.run(
        "run = ddp.launch(client, train, workers=2)\nrun", watched=False
    )
    assert kind == "execute_result"
    text = content["data"]["text/plain"]
    assert re.fullmatch(
        r"Run\(result=Tensor \(161,\), world_size=2, seconds=[\d.]+, directory=\S+, "
        r"records=\d+, restarts=0\)",
        text,
    )
    assert "<th>result</th>" in content["data"]["text/html"]


def test_a_result_is_shown_by_kind_and_size(tmp_path):
    import torch

    weights = torch.nn.LSTM(10, 20, 2).state_dict()
    shown = repr(Run(dict(weights), tmp_path, 2, [], 1.0, [ValueError("x" * 10_000)]))
    assert (
        "result=dict of 8 (weight_ih_l0: (80, 10), weight_hh_l0: (80, 20), bias_ih_l0: (80,), …)"
        in shown
    )
    assert "restarts=1" in shown and len(shown) < 300
    assert (
        "result='xxxx" in repr(Run("x" * 10_000, tmp_path, 2, [], 1.0))
        and len(repr(Run("x" * 10_000, tmp_path, 2, [], 1.0))) < 300
    )
    assert "list of 100000 (0, 1, 2, …)" in repr(Run(list(range(100_000)), tmp_path, 2, [], 1.0))
    assert "&lt;b&gt;" in Run("<b>", tmp_path, 1, [], 1.0)._repr_html_()
    assert "result=3.5" in repr(Run(3.5, tmp_path, 1, [], 1.0)) and ddp.Run is Run
