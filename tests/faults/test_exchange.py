"""Values that ranks tell each other: as JSON, so that nothing which arrives can run code."""

import os
import re
import sys
from pathlib import Path

import cloudpickle
import pytest
from ports import free_port
from test_rendezvous import start, torchrun_variables

import ddp_common as ddp
from ddp_common.ranks import exchange

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PACKAGE = Path(exchange.__file__).parents[1]
VALUES = [None, "ä🐱\udcff", [[3, "broken"], [70_000, "x" * 5000]], {"a": [1.5, True]}]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_rank_has_the_values_of_all_in_their_order(client, tmp_path, workers):
    def train():
        return [exchange.gather([ddp.rank(), value] * (ddp.rank() + 1)) for value in VALUES]

    result = ddp.launch(client, train, workers=workers, directory=tmp_path / "run").result
    assert result == [[[rank, value] * (rank + 1) for rank in range(workers)] for value in VALUES]


def test_no_module_of_ours_unpickles_what_a_peer_sends():
    calls = re.compile(r"\b\w+_object(_list)?\(")
    modules = list(PACKAGE.rglob("*.py"))
    assert len(modules) > 50
    assert [path for path in modules if calls.search(path.read_text())] == []


RETURNS = """
import pathlib, sys, torch
import ddp_common as ddp

class Opens:
    def __init__(self, path): self.path = path
    def __reduce__(self): return pathlib.Path.touch, (pathlib.Path(self.path),)

def train(path):
    plain = {"loss": [0.5], "weight": torch.ones(2)}
    return Opens(path) if path else plain

with ddp.connect() as client:
    run = ddp.launch(client, train, directory="run", path=%r)
    print("has", run.result, flush=True, file=sys.stderr)
"""


def ranks_without_a_secret(tmp_path, path):
    """Two ranks that find no folder in which they could agree on one."""
    (tmp_path / f"ddp-{os.geteuid()}").write_text("a file in its place")
    nowhere = {"HOME": str(tmp_path / f"ddp-{os.geteuid()}"), "TMPDIR": str(tmp_path)}
    port = free_port()
    return [
        start(
            RETURNS % path,
            cwd=tmp_path,
            TORCHELASTIC_RUN_ID="none",
            DDP_JOIN_TIMEOUT="100",  # they start apart from each other
            **torchrun_variables(rank, 2, port),
            **nowhere,
        )
        for rank in (0, 1)
    ]


def test_ranks_without_a_secret_say_so_and_have_a_plain_result_on_every_rank(tmp_path):
    ranks = ranks_without_a_secret(tmp_path, path=None)
    said = [process.communicate(timeout=200)[1] for process in ranks]
    assert "The ranks could not agree on a secret" in said[0]
    for each in said:
        assert "has {'loss': [0.5], 'weight': tensor([1., 1.])}" in each
    assert not list(tmp_path.glob("ddp-rank-*"))


def test_ranks_without_a_secret_unpickle_no_result_that_could_run_code(tmp_path):
    first, second = ranks_without_a_secret(tmp_path, path=str(tmp_path / "opened"))
    said = second.communicate(timeout=200)[1]
    first.kill()  # it waits for its peer; torchrun would have ended it
    first.communicate()
    assert "it is not unpickled. Set DDP_SECRET" in said
    assert not (tmp_path / "opened").exists()
