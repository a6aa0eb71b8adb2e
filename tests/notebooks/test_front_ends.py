"""What a run shows in a notebook: tqdm's bar where a user watches.

Nothing where the notebook is executed to be kept. A front end with a user before it lets a cell
ask for input (`allow_stdin`); nbclient and nbval do not. The kernel is a real one.
"""

import re
import time

import pytest
from kernels import kernel_manager
from processes import TESTS

SETUP = f"""
import os, sys
sys.path.append({TESTS!r})
os.environ["WORKERS"] = "2"
import ddp_common as ddp
from faults_on_purpose import train
client = ddp.connect()
"""
LAUNCH = "run = ddp.launch(client, train, workers=2, pause=0.3)"
# As if Ctrl-C came while a library asks for a key and goes on without it
INTERRUPT = f"""
def interrupt(*report):
    try:
        dict()["a key"]
    except KeyError:
        raise KeyboardInterrupt
{LAUNCH.removesuffix(")")}, on_report=interrupt)
"""
PLOT = f"""
from tutorials.helpers import LiveLoss
watch = LiveLoss()
{LAUNCH.removesuffix(")")}, on_report=watch)
watch.draw()
"""

# Ctrl-C comes while the bar is being made: its widget needs a quarter of a second
HALF_A_BAR = """
from unittest.mock import patch
from dask_ranks.run.progress import Progress, say
from tqdm.notebook import tqdm_notebook
with patch.object(tqdm_notebook, "status_printer", side_effect=KeyboardInterrupt):
    try:
        Progress().position({"samples": 1, "epochs": 1, "total_samples": 2})
    except KeyboardInterrupt:
        say("how to go on", sys.stdout)
"""


class Kernel:
    def __init__(self):
        self.manager = kernel_manager()
        self.manager.start_kernel()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, code, watched=True, interrupt_when=None, fails=False):
        """The messages that a cell leaves, as (type, content).

        `watched`: sent by a front end such as JupyterLab, else by nbclient or nbval.
        `interrupt_when`: a function; when it returns something true, the kernel is interrupted.
        `fails`: whether the cell may end with an exception.
        """
        # a kernel that stops on an error drops what is sent in the moment after it
        sent = self.client.execute(code, allow_stdin=watched, stop_on_error=False)
        deadline = time.monotonic() + 120
        while interrupt_when and not interrupt_when():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if interrupt_when:
            self.manager.interrupt_kernel()
        messages = []
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if content.get("execution_state") == "idle":
                break
            if kind not in ("status", "execute_input"):
                messages.append((kind, content))
        kinds = {kind for kind, _ in messages}
        assert fails or interrupt_when or "error" not in kinds, messages
        return messages

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel()
    runs = str(tmp_path_factory.mktemp("runs"))
    kernel.run(f"{SETUP}\nos.environ['RUNS'] = {runs!r}\nos.environ.pop('DDP_PROGRESS', None)")
    yield kernel
    kernel.run("client.close()")
    kernel.close()


def said(messages):
    return "".join(content["text"] for kind, content in messages if kind == "stream")


def test_where_a_user_watches_one_bar_moves_to_its_end(kernel):
    messages = kernel.run(LAUNCH)
    assert "stream" not in {kind for kind, _ in messages}  # no pink box
    (shown,) = [content["data"] for kind, content in messages if kind == "display_data"]
    assert "application/vnd.jupyter.widget-view+json" in shown
    states = [
        content["data"].get("state", {}) for kind, content in messages if kind.startswith("comm_")
    ]
    # tqdm's spaces have the width of a digit
    texts = [str(state.get("value")).replace("\u2007", " ") for state in states]
    assert any("2.0 of 2 epochs" in text for text in texts), texts
    assert any(re.search(r"loss [\d.]+", text) for text in texts), texts


def test_words_are_shown_also_if_ctrl_c_came_while_the_bar_was_made(kernel):
    assert said(kernel.run(HALF_A_BAR)).startswith("how to go on\n")  # tqdm may add words


def test_where_a_notebook_is_executed_to_be_kept_nothing_is_drawn(kernel):
    assert kernel.run(LAUNCH, watched=False) == []


def test_the_live_plot_of_pets_is_one_picture_that_changes(kernel):
    pictures = [
        (kind, content["transient"]["display_id"], content["data"]["image/png"])
        for kind, content in kernel.run(PLOT)
        if "image/png" in content["data"]
    ]
    assert [kind for kind, _, _ in pictures[:2]] == ["display_data", "update_display_data"]
    assert len({place for _, place, _ in pictures}) == 1
    assert pictures[0][2] != pictures[-1][2]


def assert_short(messages):
    (error,) = [content for kind, content in messages if kind == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    # A head, the cell, `launch` in two frames, the name
    assert len(error["traceback"]) <= 5, "\n".join(error["traceback"])


def test_an_interrupt_while_another_exception_is_handled_is_as_short(kernel):
    assert_short(kernel.run(INTERRUPT, fails=True))


def test_an_interrupted_cell_says_where_it_stopped_and_how_to_go_on(kernel, tmp_path):
    directory = str(tmp_path / "run")
    waits = "ddp.inject(train, 'hang', step=8)"  # for the interrupt
    messages = kernel.run(
        f"ddp.launch(client, {waits}, workers=2, directory={directory!r})",
        interrupt_when=lambda: list((tmp_path / "run" / "checkpoints").glob("*.pt")),
    )
    steps = re.search(
        r"Interrupted after step (\d+). The newest checkpoint is that of step (\d+). Go on from",
        said(messages),
    )
    assert steps and int(steps[1]) >= int(steps[2])
    assert_short(messages)
    hint = said(messages).splitlines()[1].strip()
    kernel.run(f"on = {hint.replace('…', 'workers=2')}", watched=False)
    kernel.run(
        "assert (on.result == ddp.launch(client, train, workers=2).result).all()", watched=False
    )


def test_a_run_as_the_last_line_of_a_cell_is_short(kernel):
    ((kind, content),) = kernel.run(f"{LAUNCH}\nrun", watched=False)
    assert kind == "execute_result" and set(content["data"]) == {"text/plain"}
    shown = content["data"]["text/plain"]
    assert re.fullmatch(r"(?s)Run\(directory=.{,200}, world_size=2.{,80}\)", shown)
