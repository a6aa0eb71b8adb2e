"""The checks of `pets` judge rightly, its data are checked, and the names it invents are tame."""

import json
import os
import re
import subprocess
from functools import partial

import jupytext
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from tutorials_here import ROOT, names_of

import ddp_common as ddp
from tutorials.checks import pets as checks
from tutorials.checks.common import Wrong
from tutorials.helpers import n_gram


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    with names_of("pets", tmp_path_factory.mktemp("runs")) as names:
        yield names


# Exercise A: a run that was stopped, killed and resumed

STOPPED = "10:00:02 interrupted from the keyboard\n"
KILLED = "10:00:04 rank 1 was killed by SIGKILL\n"
RESUMED = "10:00:06 [rank 0] Resumed from step-00000050.pt\n"
FINISHED = "10:00:20 finished: 2 rank(s), 11.0 s\n"


@pytest.mark.parametrize(
    ("log", "question"),
    [
        (STOPPED + RESUMED + KILLED + RESUMED + FINISHED, None),
        (KILLED + RESUMED + STOPPED + RESUMED + FINISHED, None),
        (STOPPED + RESUMED + KILLED + STOPPED + RESUMED + FINISHED, None),
        (STOPPED + RESUMED + STOPPED + RESUMED + FINISHED, "`kill` without -9"),
        (KILLED + RESUMED + FINISHED, "before you came"),
        (STOPPED + KILLED + RESUMED + FINISHED, "a checkpoint"),
        (STOPPED + RESUMED + KILLED, "after the run had failed"),
        (STOPPED + RESUMED + KILLED + RESUMED, "still training"),
    ],
)
def test_a_log_tells_what_was_done_to_a_run(log, question):
    missing = [asked for _, happened, asked in checks.events_in(log) if not happened]
    assert question in missing[0] if question else not missing


def test_a_run_is_accepted_unless_its_settings_were_changed_on_the_way(pets, tmp_path):
    """A run of other settings than the notebook's is right, too, but for those of the data."""
    folder = tmp_path / "run"
    chosen = {"epochs": 1, "batch_size": 256, "layers": 1, "hidden": 8}
    chosen |= {"learning_rate": 0.01, "seed": 0}
    windows, train = pets["windows"], pets["train"]
    ddp.launch(pets["client"], train, windows=windows, **chosen, workers=2, directory=folder)
    judged = partial(
        checks.resumed_by_hand, train_again=pets["train_again"], notebook=pets["settings"]
    )

    def says(**changed):
        settings = {**vars(pets["settings"]), **chosen, **changed}
        config = {"settings": settings, "workers": [{}, {}]}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "log.txt").write_text(STOPPED + RESUMED + KILLED + RESUMED + FINISHED)
        return folder

    assert "bit for bit" in judged(says)
    assert "bit for bit" in judged(lambda: f" {says()}\n")
    with pytest.raises(Wrong, match="Did you change a setting"):
        judged(lambda: says(learning_rate=0.02))
    with pytest.raises(Wrong, match="What else did you set"):
        judged(lambda: says(seed=1))


@pytest.mark.parametrize("nothing", [None, "runs/pets/…", 3])
def test_what_is_no_run_directory_is_refused(nothing):
    with pytest.raises(Wrong, match="Run directory"):
        checks.resumed_by_hand(lambda: nothing, train_again=None, notebook=None)


# What is typed in a terminal


def test_terminal_lines_work_where_jupyterlab_opens_one_in_plain_sh_and_without_git(tmp_path):
    cells = jupytext.read(ROOT / "tutorials" / "pets.py").cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    opened, run = tmp_path / "tutorials", tmp_path / "runs" / "pets" / "2026-01-31T10-00-00"
    opened.mkdir()
    run.mkdir(parents=True)
    for name in ("log", "names"):
        (run / f"{name}.txt").write_text(f"{name}\n")
    typed = "\n".join(re.findall("(?m)^ {4,}((?:cd|cat) .*)", text))
    assert typed.startswith('cd "$JUPYTER_SERVER_ROOT/.."\ncat ')
    assert '`cd "$JUPYTER_SERVER_ROOT/.."`' in text[text.index("### Exercise A") :]
    environment = {"PATH": os.defpath, "JUPYTER_SERVER_ROOT": str(opened)}
    done = subprocess.run(
        ["sh", "-ec", typed], cwd=opened, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "log\nnames\n" + "log\n", done.stderr


# Exercise B: the repair of a training


def training(
    data,
    seed,
    *,
    tell=lambda sampler, epoch: sampler.set_epoch(epoch),
    wrap=DDP,
    steps=lambda: True,
    result=lambda model: model.module.state_dict(),
    batches=None,
):
    """The training of exercise B. What may be right or wrong in it is an argument."""
    torch.manual_seed(seed)
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        tell(sampler, epoch)
        for x, y in loader if batches is None else batches(data, seed, epoch):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if steps():
                optimizer.step()
    return result(model)


def own_permutation(data, seed, epoch):
    generator = torch.Generator().manual_seed(1_000 * seed + epoch)
    mine = torch.randperm(len(data), generator=generator)[ddp.rank() :: 2].tolist()
    return DataLoader(Subset(data, mine), batch_size=4)


def rows_at_once(data, seed, epoch):
    generator = torch.Generator().manual_seed(1_000 * seed + epoch)
    mine = torch.randperm(len(data), generator=generator)[ddp.rank() :: 2]
    return [data[rows] for rows in mine.split(4)]


def with_elastic_sampler(data, seed):
    torch.manual_seed(seed)
    sampler = ddp.ElasticSampler(len(data), batch_size=8, seed=seed)
    model = DDP(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in sampler.epochs(3):
        for x, y in ddp.DataLoader(data, batch_sampler=sampler):
            loss = F.mse_loss(model(x), y) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.module.state_dict()


def averaged_by_hand(data, seed):
    class Averaging(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
            for parameter in self.parameters():
                parameter.register_hook(self.average)

        def average(self, gradient):
            torch.distributed.all_reduce(gradient)
            return gradient / 2

    return training(
        data, seed, wrap=lambda _: Averaging(), result=lambda model: model.state_dict()
    )


def names_stripped(model):
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


RIGHT = {
    "as told": training,
    "another epoch number": partial(training, tell=lambda s, epoch: s.set_epoch(7 - epoch)),
    "names stripped": partial(training, result=names_stripped),
    "the plain model kept": partial(
        training, result=lambda model: dict(model.module.state_dict())
    ),
    "own order": partial(training, batches=own_permutation),
    "rows at once": partial(training, batches=rows_at_once),
    "ElasticSampler": with_elastic_sampler,
    "averaged by hand": averaged_by_hand,
}


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_every_right_repair_is_accepted(pets, answer):
    assert "replicas agree" in checks.training_repaired(answer, client=pets["client"])


def not_told(sampler, epoch):
    pass


WRONG = {
    "nothing repaired": (
        partial(training, tell=not_told, result=lambda model: model.state_dict()),
        "Whose state",
    ),
    "the wrapper's state": (
        partial(training, result=lambda model: model.state_dict()),
        "Whose state",
    ),
    "no epoch told": (partial(training, tell=not_told), "told, and when"),
    "one epoch told": (partial(training, tell=lambda s, _: s.set_epoch(1)), "told, and when"),
    "the seed of torch in its place": (
        partial(training, tell=lambda s, epoch: torch.manual_seed(epoch)),
        "told, and when",
    ),
    "an order for each rank": (
        partial(training, tell=lambda s, epoch: s.set_epoch(2 * epoch + ddp.rank())),
        "out of the same order",
    ),
    "all samples on both ranks": (
        partial(training, batches=lambda data, *_: DataLoader(data, batch_size=4, shuffle=True)),
        "out of the same order",
    ),
    "no shuffle": (
        partial(
            training,
            batches=lambda data, seed, epoch: DataLoader(
                Subset(data, range(ddp.rank(), len(data), 2)), batch_size=4
            ),
        ),
        "told, and when",
    ),
    "DDP removed": (
        partial(training, wrap=lambda model: model, result=lambda model: model.state_dict()),
        "averaged",
    ),
    "no rank steps": (partial(training, steps=lambda: False), "leave out or change"),
    "rank 0 alone steps": (partial(training, steps=lambda: ddp.rank() == 0), "take each step"),
    "a new model": (
        partial(training, result=lambda _: {"weight": torch.ones(1, 1), "bias": torch.ones(1)}),
        "that you trained",
    ),
    "the model": (partial(training, result=lambda model: model.module), "your function return"),
    "rank 0 alone returns": (
        partial(
            training,
            result=lambda model: model.module.state_dict() if ddp.rank() == 0 else None,
        ),
        "rank 1 returns None",
    ),
    "nothing": (lambda data, seed: None, "your function return"),
}


@pytest.mark.parametrize(("answer", "question"), WRONG.values(), ids=WRONG)
def test_a_wrong_repair_is_refused_with_a_question_that_leads_on(pets, answer, question):
    with pytest.raises(Wrong, match=question):
        checks.training_repaired(answer, client=pets["client"])


# The data, and the names that are invented


@pytest.mark.parametrize(
    ("content", "said"),
    [("name,count\nbella,2\nzoë,1\n", "'zoë' has 'ë'"), ("name,count\n", "holds no names")],
)
def test_names_that_cannot_be_learned_are_refused(pets, tmp_path, content, said):
    (tmp_path / "names.csv").write_text(content)
    with pytest.raises(ddp.Error, match=said):
        pets["read_names"](tmp_path / "names.csv")


def test_windows_hold_every_character_once_and_the_one_before_them(pets):
    codes = pets["encode"](["luna"] * 20)
    text = "".join(pets["ALPHABET"][code] for code in codes)
    assert text == "+" + "luna+" * 20
    windows = pets["cut"](codes)
    assert windows.shape == (6, 17)
    assert torch.equal(windows[:, 1:].flatten(), codes[1 : 6 * 16 + 1])
    assert torch.equal(windows[1:, 0], windows[:-1, -1])


def test_n_grams_count_what_follows():
    names = ["ab", "ab", "ab", "ac"]
    equally = -torch.tensor(1 / 4).log()  # of a, b, c and '+'
    assert n_gram(names, ["ab"], n=1, prior=1e9) == pytest.approx(float(equally), rel=1e-6)
    single = n_gram(names, ["ab"], n=1, prior=0)
    letters = torch.tensor([4 / 12, 3 / 12, 4 / 12])  # a, b and '+' among 12 characters
    assert single == pytest.approx(float(-letters.log().mean()))
    pair = n_gram(names, ["ab"], n=2, prior=0)  # after a: b in 3 of 4 cases
    assert pair == pytest.approx(float(-torch.tensor(3 / 4).log() / 3), rel=1e-6)


def test_no_invented_name_is_short_rare_or_registered(pets):
    model = pets["NameModel"](layers=1, hidden=8)  # untrained: it writes anything
    registered = set(pets["table"]["name"])
    for name in pets["invent"](model, count=5_000):
        assert re.fullmatch("[a-z]+", name) and name not in registered
        assert len(re.findall("[aeiouy]+", name)) >= 3
    assert pets["is_tame"]("marabella")
    for refused in ("sam", "bella", "mara bella", "xqzaxqoxqu"):
        assert not pets["is_tame"](refused)
