"""Values that ranks tell each other: as JSON, so that nothing which arrives can run code."""

import re
import sys
from pathlib import Path

import cloudpickle
import pytest

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
