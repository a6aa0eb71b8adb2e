"""The blocks of Python in the README and in the pages run, and do what the pages say.

A block with a second word, such as `python tensorboard`, needs a package that may not be there.
"""

import gzip
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from processes import finished
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp
from tutorials import kit

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).parents[2]


def blocks(page, word=""):
    """The blocks of a page with this second word, in their order."""
    found = re.findall(r"^```python ?(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    return [code for second, code in found if second == word]


def run_blocks(page, word="", **names):
    names.setdefault("__name__", "__main__")
    for code in blocks(page, word):
        exec(compile(code, page, "exec"), names)
    return names


def test_the_example_of_the_readme_trains(tmp_path):
    (code,) = blocks("README.md")
    (tmp_path / "mine.py").write_text(code)
    done = finished("mine.py", cwd=tmp_path, env=os.environ | {"WORKERS": "2"})
    lines = done.stdout.splitlines()
    losses = [float(line.split()[1]) for line in lines if re.match(r"\d ", line)]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_a_script_of_torchrun_becomes_one_for_both_by_the_difference_on_the_page(tmp_path):
    text = (ROOT / "docs/coming-from-elsewhere.md").read_text()
    (difference,) = re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S)
    for name, other in (("before.py", "+"), ("after.py", "-")):
        lines = [line[1:] for line in difference.splitlines() if not line.startswith(other)]
        (tmp_path / name).write_text("\n".join(lines))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    errors = []
    for command in ([*torchrun, "before.py"], [*torchrun, "after.py"], ["after.py"]):
        done = finished(*command, cwd=tmp_path, env=os.environ | {"WORKERS": "2"})
        errors.append([float(each) for each in re.findall(r"error (\S+)", done.stdout)])
    for of_epochs in errors:
        assert len(of_epochs) == 5 and of_epochs[-1] < 0.2 * of_epochs[0]
    assert errors[1] == errors[2]


def test_the_network_of_the_page_on_tables_learns_also_from_parquet(client, tmp_path):
    names = run_blocks("docs/dask-data.md", client=client)
    minutes = names["compared"].minutes
    assert names["minutes_wrong"] < 0.6 * (minutes - minutes.mean()).abs().mean()
    names["table"].astype({"day": str}).to_parquet(tmp_path)
    run_blocks("docs/dask-data.md", "parquet", **names, folder=str(tmp_path))


def test_the_loop_with_a_schedule_goes_on_with_both_where_the_run_before_ended(client):
    names = run_blocks("docs/loops.md", client=client)
    again = names["again"]
    # the second launch added two epochs to the two of the first, and repeated none
    of_ranks = again.metrics.groupby("rank")
    assert all(steps == [*range(1, 17)] for steps in of_ranks["step"].apply(list))
    rates = [0.01 + 0.09 * min(step, 10) / 10 for step in range(16)]
    assert all(of_rank == pytest.approx(rates) for of_rank in of_ranks["rate"].apply(list))
    undisturbed = ddp.launch(client, names["train"], epochs=4, directory=False)
    torch.testing.assert_close(again.result, undisturbed.result)


def test_recipes_train_as_one_rank_does_are_watched_leave_traces_and_go_to_a_bucket(
    client, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    names = run_blocks("docs/recipes.md", client=client)
    for recipe in (
        "train_with_average",
        "train_with_class_weights",
        "train_on_drawn_rows",
        "train_on_a_stream",
    ):
        one, two = (ddp.launch(client, names[recipe], workers=n, epochs=3).result for n in (1, 2))
        assert torch.allclose(one, two, rtol=0, atol=1e-6), recipe
    _stops_early_and_keeps_the_best_model(client, names)
    _each_rank_goes_on_with_its_own_state(client, names["OfEachRank"])
    assert names["seen"][0]["step"] == 1 and "loss" in names["seen"][0]
    for path in sorted((names["run"].directory / "trace").iterdir()):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert any(event["name"].startswith("gloo:all_reduce") for event in events)
    kept, copied = names["run"].directory, tmp_path / "runs" / "from-bucket"
    files = [path.relative_to(kept) for path in kept.rglob("*") if path.is_file()]
    assert files and all(
        (kept / each).read_bytes() == (copied / each).read_bytes() for each in files
    )
    assert ddp.launch(client, ddp.rank, workers=1, directory=copied).directory == copied


def _stops_early_and_keeps_the_best_model(client, names):
    train = names["train_until_no_better"]
    stopped = ddp.launch(client, train, workers=2, epochs=200, patience=2)
    errors = stopped.metrics.groupby("epoch")["held_out"].first()
    assert stopped.result == errors.min() and 3 < len(errors) < 200
    network = names["network"]()
    network.load_state_dict(names["best_weights"](stopped))
    x, y = names["samples"]()
    _, validation = ddp.split(len(x), [0.25], seed=0)
    with torch.no_grad():
        error = (network(x[validation]) - y[validation]).square().mean()
    assert float(error) == pytest.approx(stopped.result, rel=1e-5)
    # A resumed run compares with the best of the run before, and stops where that would have
    begun = ddp.launch(client, train, workers=2, epochs=len(errors) - 1, patience=2)
    again = ddp.launch(client, train, workers=2, epochs=200, patience=2, directory=begun.directory)
    assert again.result == stopped.result
    assert again.metrics["epoch"].max() == errors.index[-1]


class Reader:
    """What a rank has of its own: how far it has read."""

    def __init__(self):
        self.done = 0

    def state_dict(self):
        return {"done": self.done, "next": torch.tensor(self.done + 1)}

    def load_state_dict(self, state):
        self.done = state["done"]


def read_on(wrap=lambda reader: reader):
    reader = Reader()
    checkpoint = ddp.Checkpoint(reader=wrap(reader))
    checkpoint.restore()
    reader.done += 10 + ddp.rank()
    checkpoint.save()
    done = torch.zeros(ddp.world_size())
    done[ddp.rank()] = reader.done
    torch.distributed.all_reduce(done)
    return done.tolist()


def _each_rank_goes_on_with_its_own_state(client, wrap):
    first = ddp.launch(client, read_on, workers=2, wrap=wrap)
    again = ddp.launch(client, read_on, workers=2, wrap=wrap, directory=first.directory)
    assert (first.result, again.result) == ([10, 11], [20, 22])
    with pytest.raises(ddp.RankFailed, match="The states are of 2 ranks"):
        ddp.launch(client, read_on, workers=1, wrap=wrap, directory=first.directory)
    with pytest.raises(ddp.RankFailed, match=r"do not have the same: reader\['done'\]"):
        ddp.launch(client, read_on, workers=2)


def test_a_search_gives_up_trials_early_and_its_workers_are_free_again(client):
    optuna = pytest.importorskip("optuna")
    names = run_blocks("docs/recipes.md", client=client)
    names = run_blocks("docs/recipes.md", "optuna", **names)
    states = [trial.state for trial in names["study"].trials]
    assert len(states) == 8 and optuna.trial.TrialState.FAIL not in states
    assert ddp.launch(client, ddp.world_size, workers=4).result == 4


def test_images_are_read_as_the_page_on_images_shows(tmp_path, s3, capsys):
    drawn, folder = Path(kit.fetch("dogs").path), tmp_path / "dogs"
    for breed in ("beagle", "pug"):
        (folder / breed).mkdir(parents=True)
        for path in sorted((drawn / breed).iterdir())[:8]:
            shutil.copy(path, folder / breed)
    s3.mkdir("kennel")
    s3.put(str(folder), "kennel/", recursive=True)
    run_blocks("docs/dask-data.md", "images", folder=str(folder))
    said = capsys.readouterr().out
    assert "the images from the bucket are those from the disk, bit for bit" in said
    assert "is no image that can be read" in said


def run_the_page_on_gpus(codes):
    """On a rank: what the steps of the page do to its network, and a step with FSDP."""
    names = {}
    for code in codes:
        exec(compile(code, "docs/gpu.md", "exec"), names)
    x, y = (each[:50] for each in names["data"].tensors)
    parameters = list(names["network"].parameters())
    before = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
    names["step_in_float16"](x, y, weight=math.inf)
    is_left_out = torch.equal(torch.nn.utils.parameters_to_vector(parameters), before)

    loss = torch.nn.functional.cross_entropy(names["network"](x), y) * 0.5
    expected = torch.autograd.grad(loss, parameters)
    names["step_in_parts"](x, y, 4, weight=0.5)
    for parameter, gradient in zip(parameters, expected):
        torch.testing.assert_close(parameter.grad, gradient)

    def with_ddp(network):
        return DistributedDataParallel(network), torch.optim.Adam(network.parameters())

    networks = []
    for wrap in (with_ddp, names["with_fsdp"]):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 10))
        model, optimizer = wrap(network)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        networks.append(network)
    whole = names["whole_weights"](networks[1])
    return names["sampler"].epoch, is_left_out, networks[0].state_dict(), whole


def test_the_steps_of_the_page_on_gpus_are_those_of_one_batch(client):
    codes = blocks("docs/gpu.md")
    epoch, is_left_out, plain, sharded = ddp.launch(
        client, run_the_page_on_gpus, workers=2, codes=codes
    ).result
    assert epoch == 2 and is_left_out
    for name, value in plain.items():
        torch.testing.assert_close(value, sharded[name])
