"""The checks of `pets` judge rightly, its data are checked, and the names it invents are tame."""

import json
import os
import pickle
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
from tutorials.checks.common import Wrong, judge
from tutorials.helpers import ALPHABET, n_gram, name_filter, read_names


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    with names_of("pets", tmp_path_factory.mktemp("runs")) as names:
        yield names


# The prediction


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        ("same", "'same'. Right"),
        (" Same!", "'same'. Right"),
        ("close", "'close'. Not right"),
        ("they are different", "'different'. Not right"),
        ("not the same", "is that same, close or different"),
        ("same or close", "is that same, close or different"),
        ("same up to rounding", "is that same, close or different"),
        ("equal up to rounding, with the same batches", "is that same, close or different"),
        ("only rounding differs", "'close'. Not right"),
        (3, "is that same, close or different"),
        (None, "no prediction"),
        (..., "no prediction"),
    ],
)
def test_each_prediction_gets_a_reply(said, reply):
    assert reply in checks.prediction(said)


# Exercise A: a resume by hand

BATCHES = torch.rand(40, 4, 3)


def written(model, optimizer, steps):
    return {"model": model.state_dict(), "adam": optimizer.state_dict(), "steps": steps}


def read(model, optimizer, state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["adam"])
    return state["steps"]


def save_whole(file, model, optimizer, steps):
    torch.save(written(model, optimizer, steps), file)


def load_whole(file, model, optimizer):
    return read(model, optimizer, torch.load(file))


def resume(until, file, *, load=load_whole, save=save_whole, each=False, early=0):
    """The training of exercise A, on three numbers. What may be wrong in it is an argument."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    begin = load(file, model, optimizer) if file.exists() else 0
    for step in range(begin, until):
        optimizer.zero_grad()
        model(BATCHES[step]).square().mean().backward()
        optimizer.step()
        if each:
            save(file, model, optimizer, step + 1)
    if not each:
        save(file, model, optimizer, until - early)
    return model


def save_objects(file, model, optimizer, steps):
    torch.save([model, optimizer, steps], file)


def load_objects(file, model, optimizer):
    loaded, its_optimizer, steps = torch.load(file, weights_only=False)
    return read(model, optimizer, written(loaded, its_optimizer, steps))


def save_pickle(file, model, optimizer, steps):
    file.write_bytes(pickle.dumps(written(model, optimizer, steps)))


def load_pickle(file, model, optimizer):
    return read(model, optimizer, pickle.loads(file.read_bytes()))


def save_by_name(file, model, optimizer, steps):
    with open(f"{file}.part", "wb") as part:
        torch.save(written(model, optimizer, steps), part)
    os.replace(f"{file}.part", file)


def steps_of_adam(file, model, optimizer):
    read(model, optimizer, torch.load(file))
    return int(next(iter(optimizer.state.values()))["step"])


RESUMED = {
    "as told": resume,
    "after each step": partial(resume, each=True),
    "whole objects": partial(resume, save=save_objects, load=load_objects),
    "pickle": partial(resume, save=save_pickle, load=load_pickle),
    "renamed when whole": partial(resume, save=save_by_name),
    "Adam knows the step": partial(resume, load=steps_of_adam),
}


@pytest.mark.parametrize("answer", RESUMED.values(), ids=RESUMED)
def test_every_resume_by_hand_that_works_is_right(answer):
    assert checks.resumed(answer).startswith("15 steps after the stop")


def weights_alone(file, model, optimizer):
    state = torch.load(file)
    model.load_state_dict(state["model"])
    return state["steps"]


def not_the_weights(file, model, optimizer):
    state = torch.load(file)
    optimizer.load_state_dict(state["adam"])
    return state["steps"]


def not_the_step(file, model, optimizer):
    load_whole(file, model, optimizer)
    return 0


def save_in_two_files(file, model, optimizer, steps):
    torch.save(model.state_dict(), file)
    torch.save([optimizer.state_dict(), steps], file.with_suffix(".adam"))


def load_two_files(file, model, optimizer):
    adam, steps = torch.load(file.with_suffix(".adam"))
    return read(model, optimizer, {"model": torch.load(file), "adam": adam, "steps": steps})


def with_the_loaded_weights(until, file):
    loaded = torch.load(file)["model"] if file.exists() else None
    model = resume(until, file)
    if loaded is not None:
        model.load_state_dict(loaded)
    return model


IN_MEMORY = {}


def save_in_memory(file, model, optimizer, steps):
    IN_MEMORY[file] = written(model, optimizer, steps)
    file.write_text("saved")


def load_in_memory(file, model, optimizer):
    return read(model, optimizer, IN_MEMORY[file])


NOT_RESUMED = {
    "untouched": (partial(resume, save=lambda *_: None), "nothing is written yet"),
    "no load": (partial(resume, load=lambda *_: 0), "Does it load the file"),
    "weights alone": (partial(resume, load=weights_alone), "What does Adam keep"),
    "not the weights": (partial(resume, load=not_the_weights), "Which states"),
    "not the step": (partial(resume, load=not_the_step), "Does it load the file"),
    "one step too early": (partial(resume, early=1), "From which step"),
    "the text's 25 steps": (
        partial(resume, load=lambda *parts: load_whole(*parts) and 25),
        "after a stop at step 10",
    ),
    "two files": (
        partial(resume, save=save_in_two_files, load=load_two_files),
        "also needs moved.adam",
    ),
    "the loaded weights": (with_the_loaded_weights, "Which model is returned"),
    "another name": (
        lambda until, file: resume(until, file.with_name("checkpoint.pt")),
        "under which name",
    ),
    "returns nothing": (lambda until, file: resume(until, file) and None, "the last line"),
}


@pytest.mark.parametrize(("answer", "question"), NOT_RESUMED.values(), ids=NOT_RESUMED)
def test_a_resume_that_loses_something_gets_a_question(answer, question):
    with pytest.raises(Wrong, match=question):
        checks.resumed(answer)


def test_what_only_this_process_knows_is_no_resume(capsys):
    judge(checks.resumed, partial(resume, save=save_in_memory, load=load_in_memory))
    assert capsys.readouterr().out.count("not yet") == 1


# Exercise B: a run that was stopped, killed and resumed

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
    given = {name: pets[name] for name in ("client", "train", "windows")}
    judged = partial(checks.resumed_by_hand, **given, notebook=pets["settings"])

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
        checks.resumed_by_hand(
            lambda: nothing, client=None, train=None, windows=None, notebook=None
        )


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
    assert '`cd "$JUPYTER_SERVER_ROOT/.."`' in text[text.index("### Exercise B") :]
    environment = {"PATH": os.defpath, "JUPYTER_SERVER_ROOT": str(opened)}
    done = subprocess.run(
        ["sh", "-ec", typed], cwd=opened, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "log\nnames\n" + "log\n", done.stderr


# Exercise C: the repair of a training


def training(
    data,
    seed,
    *,
    tell=lambda sampler, epoch: sampler.set_epoch(epoch),
    wrap=DDP,
    steps=lambda: True,
    result=lambda model: model.module.state_dict(),
    batches=None,
    loader=None,
):
    """The training of exercise C. What may be right or wrong in it is an argument."""
    torch.manual_seed(seed)
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=4, sampler=sampler, **(loader or {}))
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


def names_cut(model):
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(
        state := model.state_dict(), "module."
    )
    return state


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
    "a loader worker": partial(training, loader={"num_workers": 1}),
    "loader workers": partial(training, loader={"num_workers": 2, "persistent_workers": True}),
    "an update of names": partial(training, result=names_cut),
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
    "another seed than the argument": (
        lambda data, seed: training(data, 0),
        "with its argument `seed`",
    ),
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
            training, result=lambda model: model.module.state_dict() if ddp.rank() == 0 else None
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
def test_names_that_cannot_be_learned_are_refused(tmp_path, content, said):
    (tmp_path / "names.csv").write_text(content)
    with pytest.raises(ddp.Error, match=said):
        read_names(tmp_path / "names.csv")


def test_windows_hold_every_character_once_and_the_one_before_them(pets):
    windows = pets["windows"]
    assert windows.shape[1] == 17 and torch.equal(windows[1:, 0], windows[:-1, -1])
    row = pets["row"]
    text = "".join(ALPHABET[code] for code in row)
    assert text[1:-1].split("+") == list(pets["shuffled"])
    assert torch.equal(windows[:, 1:].flatten(), row[1 : len(windows) * 16 + 1])


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
    is_tame = name_filter(registered)
    assert is_tame("marabella")
    for refused in ("sam", "bella", "mara bella", "xqzaxqoxqu"):
        assert not is_tame(refused)
