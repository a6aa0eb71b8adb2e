"""The blocks of Python in the README and in the pages run, and do what the pages say.

A block with a second word, such as `python tensorboard`, needs a package that may not be there.
"""

import gzip
import json
import math
import os
import re
import shutil
import signal
import sys
from collections import OrderedDict
from functools import partial
from itertools import takewhile
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from patience import PATIENCE
from PIL import Image
from processes import finished, saved_steps
from sklearn.metrics import roc_auc_score
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset, random_split

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


def test_a_plain_loop_of_ddp_is_launched_on_any_cluster_of_dask(tmp_path):
    (code,) = blocks("docs/dask-ranks.md")
    (tmp_path / "plain.py").write_text(code)
    assert 0 < float(finished("plain.py", cwd=tmp_path).stdout.splitlines()[-1]) < 1


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


def test_a_program_in_the_style_of_dask_pytorch_ddp_is_ported(client, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(12):
            image = Image.effect_noise((32, 32), 10 if name == "cat" else 90)
            image.save(tmp_path / "images" / name / f"{number}.png")
    run = run_blocks("docs/coming-from-elsewhere.md", client=client, url=tmp_path / "images")[
        "run"
    ]
    steps = -(-24 // (8 * run.world_size))
    assert run.metrics["step"].max() == 2 * steps and saved_steps(run.directory)[-1] == 2 * steps
    assert (run.directory / "rank-1.txt").read_text() == "cat, dog"


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


def on_one_and_three(client, function, **arguments):
    """What a function returns on one rank, and on three."""
    run = partial(ddp.launch, client, function, stall_timeout=PATIENCE, **arguments)
    return [run(workers=ranks).result for ranks in (1, 3)]


def test_recipes_train_as_one_rank_does_are_watched_leave_traces_and_go_to_a_bucket(
    client, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    names = run_blocks("docs/recipes.md", client=client)
    averages = on_one_and_three(client, names["train_with_average"], epochs=3)
    weights = on_one_and_three(client, names["train_on_a_stream"], epochs=3)
    for one, three in (map(names["weights_of"], averages), weights):
        assert torch.allclose(one, three, rtol=0, atol=1e-6)
    _stops_early_and_keeps_the_best_model(client, names)
    _each_rank_goes_on_with_its_own_state(client, names["OfEachRank"])
    _one_rank_of_a_host_unpacks_for_all(client, names["unpacked"], tmp_path)
    losses = [run.metrics["loss"].iloc[-1] for run in names["of_rates"]]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3
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


def _one_rank_of_a_host_unpacks_for_all(client, unpacked, tmp_path):
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/one.txt").write_text("1")
    archive = shutil.make_archive(str(tmp_path / "photos"), "zip", tmp_path / "packed")

    def names_in(folder):
        return sorted(os.listdir(unpacked(archive, folder)))

    run = ddp.launch(client, names_in, workers=2, folder=str(tmp_path / "here"))
    assert run.result == ["one.txt"]


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


@pytest.fixture(scope="module")
def recipes():
    """What the page defines, up to the first block that launches."""
    names = {"__name__": "__main__"}
    for code in takewhile(lambda code: "launch(" not in code, blocks("docs/recipes.md")):
        exec(compile(code, "docs/recipes.md", "exec"), names)
    return names


def train_in_float64(
    loss=None, alone=None, step=None, draw=lambda data, importance, epoch: data, batch=238
):
    """Returns the weights after an epoch, in whose last step one rank of three has no row.

    One rank has the loss `alone`, if it is given: without a factor, of the rows that it has.
    """
    if alone and ddp.world_size() == 1:
        loss = alone
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    classes = (x.sum(1) > 0).long()
    layers = torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
    sampler = ddp.ElasticSampler(len(x), batch)
    for epoch in sampler.epochs(1):
        data = draw(TensorDataset(x, classes), 1.0 + 2 * classes, epoch)
        for inputs, targets in ddp.DataLoader(data, batch_sampler=sampler):
            if step:
                step(lbfgs, model, inputs, F.one_hot(targets, 2).double(), sampler.weight)
            else:
                sgd.zero_grad()
                loss(model, inputs, targets, sampler.weight).backward()
                sgd.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def of_classes(mean, model, x, classes, weight):
    return mean(model(x), classes, torch.tensor([1.0, 10.0]), weight)


def of_scores(loss, model, x, classes, weight):
    return loss(model(x), classes, weight)


def of_masks(dice, model, x, classes, weight):
    return dice(model(x)[:, 1], classes > 0, weight)


def of_pairs(contrastive, model, x, classes, weight):
    return contrastive(*model(torch.cat([x, x.sin()])).chunk(2), weight)


def the_sum(scores, classes, weight):
    return F.cross_entropy(scores, classes, reduction="sum")


def dice(scores, targets, weight):
    p = scores.sigmoid()
    return 1 - 2 * p[targets].sum() / (p.sum() + targets.sum())


def by_torchs_gather(a, b, weight):
    a, b = (torch.cat(all_gather(F.normalize(each))) for each in (a, b))
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


KINDS = ["classes", "a sum", "pairs", "torch's gather", "masks", "L-BFGS", "drawn rows"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_recipe_is_that_of_one_process_with_the_whole_batch(client, recipes, kind):
    def both(function, recipe, alone):
        return dict(loss=partial(function, recipes[recipe]), alone=partial(function, alone))

    by_class = partial(of_classes, recipes["mean_by_class"])
    arguments = {
        "classes": dict(loss=by_class),
        "a sum": both(of_scores, "sum_of_losses", the_sum),
        "pairs": both(of_pairs, "contrastive_loss", by_torchs_gather),
        "torch's gather": dict(loss=partial(of_pairs, by_torchs_gather), batch=60),
        "masks": both(of_masks, "dice_loss", dice),
        "L-BFGS": dict(step=recipes["step_of_lbfgs"]),
        "drawn rows": dict(loss=by_class, draw=recipes["drawn"]),
    }
    one, three = on_one_and_three(client, train_in_float64, **arguments[kind])
    assert torch.allclose(one, three, rtol=0, atol=1e-12)


def test_averaged_weights_have_the_statistics_of_all_rows(client, recipes):
    train, x = recipes["train_with_average"], recipes["samples"]()[0]
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    for average in on_one_and_three(client, train, epochs=1, make=lambda: model):
        assert torch.allclose(average[0].running_mean, x.mean(0), rtol=0, atol=1e-6)


def test_predictions_of_all_ranks_are_in_the_order_of_the_data(client, recipes):
    x, y = recipes["samples"](241)
    model = recipes["network"]()
    right = model(x)[:, 0].tolist()
    for scores in on_one_and_three(client, recipes["scores_in_order"], model=model, x=x):
        assert scores == pytest.approx(right, rel=1e-4)
        assert roc_auc_score(y > 0, scores) == pytest.approx(roc_auc_score(y > 0, right))


def test_a_patient_is_in_one_part_only(recipes):
    patients = [f"patient {row % 17}" for row in range(100)]
    parts = recipes["split_groups"](patients, [0.2, 0.1])
    assert sorted(row for part in parts for row in part) == [*range(100)]
    assert sum(len({patients[row] for row in part}) for part in parts) == 17


class Remembers(list):
    def __getitem__(self, row):
        return self.epoch


def epochs_seen(persistent):
    """By a data set that remembers the epoch, in a loader's worker."""
    data = Remembers(range(8))
    sampler = ddp.ElasticSampler(len(data), 8)
    options = dict(num_workers=1, persistent_workers=persistent)
    loader = ddp.DataLoader(data, batch_sampler=sampler, **options)
    return [int(batch[0]) for data.epoch in sampler.epochs(3) for batch in loader]


def splits_agree():
    seed = torch.Generator().manual_seed(0)
    splits = [random_split(range(100), [0.8, 0.2], generator=each) for each in (None, seed)]
    everyones = [None, None]
    torch.distributed.all_gather_object(everyones, [part.indices for part, _ in splits])
    return [one == two for one, two in zip(*everyones)]


def rows_counted():
    """Of all ranks: those that came, and those with a weight."""
    counts = torch.zeros(2)
    sampler = ddp.ElasticSampler(9, 4)
    for epoch in sampler.epochs(1):
        for rows in sampler.batches():
            counts += torch.tensor([len(rows), len(rows) * (sampler.weight > 0)])
    torch.distributed.all_reduce(counts)
    return counts.tolist()


@pytest.mark.parametrize(
    "function, arguments, result",
    [
        (rows_counted, {}, [10, 9]),
        (epochs_seen, {"persistent": True}, [0, 0, 0]),
        (epochs_seen, {"persistent": False}, [0, 1, 2]),
        (splits_agree, {}, [False, True]),
    ],
)
def test_what_each_rank_or_loader_worker_has_of_its_own(client, function, arguments, result):
    assert ddp.launch(client, function, workers=2, **arguments).result == result


def leave_when(rank_0_says):
    sampler = ddp.ElasticSampler(8, 4)
    for epoch in sampler.epochs(9):
        for _ in sampler.batches():
            torch.distributed.barrier()
        if rank_0_says(epoch == 3 - 2 * ddp.rank()):
            return epoch


def test_rank_0_decides_for_all(client, recipes):
    run = partial(ddp.launch, client, leave_when, workers=2)
    assert run(rank_0_says=recipes["rank_0_says"]).result == 3
    with pytest.raises(ddp.RankFailed, match="Rank 1 of 2"):
        run(rank_0_says=bool)


class DiesOnce(OrderedDict):
    """Kills its rank while it is written to a file."""

    def __reduce__(self):
        if not self["mark"].exists():
            self["mark"].touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return OrderedDict, ()


def train_with_snapshot(save_snapshot, path):
    first, trained = torch.load(path)["done"] if path.exists() else 0, []
    for epoch in range(first, 4):
        torch.distributed.all_reduce(torch.ones(1))
        trained.append(epoch)
        dies = DiesOnce(mark=path.with_name("mark")) if epoch == 2 else None
        save_snapshot(path, done=epoch + 1, dies=dies)
    return trained


def test_a_restart_goes_on_from_a_snapshot_that_is_whole(client, recipes, tmp_path):
    options = dict(save_snapshot=recipes["save_snapshot"], path=tmp_path / "snapshot.pt")
    run = ddp.launch(client, train_with_snapshot, workers=2, restarts=1, **options)
    assert run.result == [2, 3]


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

    loss = F.cross_entropy(names["network"](x), y) * 0.5
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
        F.cross_entropy(model(x), y).backward()
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
