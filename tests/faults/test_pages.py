"""What pages and notebooks show works: blocks of Python on three pages, a cell that runs again."""

import os
import re
from pathlib import Path

import pytest
import torch
from patience import PATIENCE

import ddp_common as ddp

DOCS = Path(__file__).parents[2] / "docs"


def run_blocks(page, names, tracker=""):
    """Execute the blocks of a page that belong to a tracker, or to none."""
    text = (DOCS / page).read_text()
    for name, code in re.findall(r"^```python ?(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
        if name == tracker:
            exec(compile(code, f"docs/{page}", "exec"), names)


@pytest.fixture
def names(client):
    return {"__name__": "__main__", "client": client}


def test_the_network_of_the_page_on_tables_learns(names):
    run_blocks("dask-data.md", names)
    minutes = names["compared"].minutes
    assert names["minutes_wrong"] < 0.6 * (minutes - minutes.mean()).abs().mean()


def test_the_study_of_the_page_on_watching_prunes_and_its_workers_are_free_again(
    names, client, tmp_path
):
    optuna = pytest.importorskip("optuna")
    names["folder"] = tmp_path
    run_blocks("watching.md", names)
    assert names["seen"] == list(names["run"].records)
    run_blocks("watching.md", names, tracker="optuna")
    states = [trial.state for trial in names["study"].trials]
    assert len(states) == 8 and optuna.trial.TrialState.FAIL not in states
    assert ddp.launch(client, ddp.world_size, workers=4).result == 4


@pytest.mark.parametrize(
    "recipe",
    [
        "train_with_average",
        "train_with_loader_workers",
        "train_with_class_weights",
        "train_on_drawn_rows",
        "train_on_a_stream",
    ],
)
def test_recipes_end_with_the_same_weights_on_two_ranks_as_on_one(names, client, recipe):
    run_blocks("recipes.md", names)
    one, two = (ddp.launch(client, names[recipe], workers=n, epochs=3).result for n in (1, 2))
    assert torch.allclose(one, two, rtol=0, atol=1e-6)


def test_a_cell_that_connects_and_is_run_again_goes_on_with_its_cluster():
    from kernels import kernel_manager

    manager = kernel_manager()
    manager.start_kernel(env={**os.environ, "DDP_PROGRESS": "off"})
    kernel = manager.blocking_client()
    kernel.start_channels()

    def run(code):
        said = []
        message = kernel.session.msg("execute_request", {"code": code}, metadata={"cellId": "one"})
        kernel.shell_channel.send(message)
        while True:
            answer = kernel.get_iopub_msg(timeout=3 * PATIENCE)
            if answer["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                said.append(answer["content"].get("text", ""))
                if answer["content"].get("execution_state") == "idle":
                    return "".join(said)

    try:
        kernel.wait_for_ready(timeout=2 * PATIENCE)
        connect = "import ddp_common as ddp; client = ddp.connect('local', workers=1)"
        assert run(connect) == ""
        assert "going on with its 1 workers" in run(connect)
        assert "is closed first" in run(connect.replace("=1", "=2"))
        run("client.close()")
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
