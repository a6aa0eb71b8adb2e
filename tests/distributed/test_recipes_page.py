"""The page of recipes: each one trains on two ranks as it does on one."""

import re
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "recipes.md").read_text()


@pytest.fixture(scope="module")
def recipes():
    names = {"__name__": "__main__"}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S):
        exec(compile(code, "docs/recipes.md", "exec"), names)
    return names


@pytest.fixture
def on_ranks(client, tmp_path):
    """Runs a recipe on a number of ranks, each in a run directory of its own."""

    def launch(function, ranks, **arguments):
        place = tmp_path / f"{ranks}-{len(list(tmp_path.iterdir()))}"
        return ddp.launch(client, function, workers=ranks, directory=place, **arguments)

    return launch


@pytest.mark.parametrize(
    "name",
    [
        "train_with_average",
        "train_with_loader_workers",
        "train_with_class_weights",
        "train_on_drawn_rows",
        "train_on_a_stream",
    ],
)
def test_two_ranks_end_with_the_weights_of_one(recipes, on_ranks, name):
    one, two = (on_ranks(recipes[name], ranks, epochs=3).result for ranks in (1, 2))
    assert torch.allclose(one, two, rtol=0, atol=1e-6)


def test_the_average_is_not_the_last_weights_and_is_resumed(recipes, on_ranks, tmp_path, client):
    average = on_ranks(recipes["train_with_average"], 2, epochs=3).result
    plain = on_ranks(recipes["train_with_loader_workers"], 2, epochs=3).result
    assert not torch.allclose(average, plain, atol=1e-3)
    place = tmp_path / "resumed"
    for epochs in (1, 3):
        run = ddp.launch(
            client, recipes["train_with_average"], workers=2, directory=place, epochs=epochs
        )
    assert torch.allclose(run.result, average, rtol=0, atol=1e-6)


def test_ranks_clip_by_the_norm_of_the_averaged_gradient(recipes, on_ranks):
    runs = [on_ranks(recipes["train_clipped"], ranks, epochs=2, longest=0.5) for ranks in (1, 2)]
    assert torch.allclose(runs[0].result, runs[1].result, rtol=0, atol=1e-5)
    norms = runs[1].metrics.pivot(index="step", columns="rank", values="norm")
    assert (norms.max(axis=1) > 0.5).any(), "nothing was clipped"
    assert torch.allclose(torch.tensor(norms[0].values), torch.tensor(norms[1].values))


def test_bfloat16_learns_and_parameters_stay_float32(recipes, on_ranks):
    run = on_ranks(recipes["train_in_bfloat16"], 2, epochs=8)
    losses = run.metrics.groupby("epoch")["loss"].mean()
    assert run.result == {torch.float32}
    assert losses.iloc[-1] < 0.5 * losses.iloc[0]


def test_all_ranks_stop_at_the_same_epoch_by_the_same_number(recipes, on_ranks):
    arguments = {"epochs": 200, "patience": 2}
    one, two = (on_ranks(recipes["train_until_no_better"], n, **arguments) for n in (1, 2))
    assert one.result == two.result < 199, "it was to stop before the last epoch"
    by_rank = two.metrics.pivot(index="epoch", columns="rank", values="held_out")
    assert len(by_rank) == two.result + 1
    assert (by_rank[0] == by_rank[1]).all()


def test_weights_of_other_code_are_taken_once(recipes, on_ranks, client, tmp_path):
    torch.manual_seed(7)
    other = recipes["network"]()
    for each in other.parameters():
        torch.nn.init.normal_(each)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    arguments = {"workers": 2, "directory": tmp_path / "run", "path": str(tmp_path / "other.pt")}
    before, first = ddp.launch(client, recipes["train_on"], epochs=1, **arguments).result
    assert torch.equal(before, recipes["weights_of"](other))
    again, _ = ddp.launch(client, recipes["train_on"], epochs=2, **arguments).result
    assert torch.equal(again, first)


def test_a_group_of_some_ranks_adds_up_its_own(recipes, on_ranks):
    assert on_ranks(recipes["sum_of_even_ranks"], 3, value=10).result == 10 + 12
