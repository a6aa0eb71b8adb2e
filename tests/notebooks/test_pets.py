"""The checks of `pets` judge rightly, its data are checked, and the names it invents are tame."""

import json
import re

import jupytext
import pytest
from tutorials_here import ROOT, names_of

import ddp_common as ddp
from tutorials.checks import pets as checks
from tutorials.checks.common import Wrong


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
    """A run of other settings than the notebook's is right, too."""
    folder = tmp_path / "run"
    chosen = {"epochs": 1, "batch_size": 4096, "layers": 1, "hidden": 8}
    chosen |= {"learning_rate": 0.01, "seed": 0}
    samples = {name: pets[name] for name in ("contexts", "targets")}
    train = pets["train"]
    ddp.launch(pets["client"], train, **samples, **chosen, workers=2, directory=folder)

    def says(**changed):
        settings = {**vars(pets["settings"]), **chosen, **changed}
        config = {"settings": settings, "workers": [{}, {}]}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "log.txt").write_text(STOPPED + RESUMED + KILLED + RESUMED + FINISHED)
        return folder

    assert "bit for bit" in checks.resumed_by_hand(says)
    with pytest.raises(Wrong, match="Did you change a setting"):
        checks.resumed_by_hand(lambda: says(learning_rate=0.02))


@pytest.mark.parametrize("nothing", [None, "runs/pets/…", 3])
def test_what_is_no_run_directory_is_refused(nothing):
    with pytest.raises(Wrong, match="Run directory"):
        checks.resumed_by_hand(lambda: nothing)


# Exercise B: the repair of a script

LOOP = "for epoch in range(3):\n"
TOLD = (LOOP, LOOP + "    sampler.set_epoch(epoch)\n")
SAVED = ("model.state_dict()", "model.module.state_dict()")


@pytest.fixture(scope="module")
def script():
    """The script with two faults, as it stands in the notebook."""
    cells = jupytext.read(ROOT / "tutorials" / "pets.py").cells
    (source,) = [cell.source for cell in cells if "def broken_script" in cell.source]
    names = {}
    exec(source, names)
    return names["broken_script"]()


def repaired(script, *changes):
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    return script


PERMUTED = """    torch.manual_seed(seed + epoch)
    mine = torch.randperm(samples)[rank::2].tolist()
    loader = DataLoader(torch.utils.data.Subset(data, mine), batch_size=4)
"""


OTHERWISE = "    loader.sampler.set_epoch(100 + epoch)\n"
RIGHT = {
    "lower case": lambda script: ({"b", "e"}, repaired(script, TOLD, SAVED)),
    "letters as text": lambda script: [repaired(script, (LOOP, LOOP + OTHERWISE), SAVED), "E, B"],
    "a sentence": lambda script: (
        "B: a new order is missing; E: names",
        repaired(script, TOLD, SAVED),
    ),
    "own sampler": lambda script: (["B", "E"], repaired(script, (LOOP, LOOP + PERMUTED), SAVED)),
}


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_every_right_repair_is_accepted(script, answer):
    assert "replicas agree" in checks.script_repaired(lambda: answer(script))


WRONG = {
    "DDP removed": ([TOLD, ("DDP(torch.nn.Linear(1, 1))", "torch.nn.Linear(1, 1)")], "averaged"),
    "all ranks save": ([TOLD, SAVED, ("if rank == 0:", "if True:")], "write one file"),
    "rank 0 alone steps": (
        [TOLD, SAVED, ("        optimizer.step()", "        if rank == 0: optimizer.step()")],
        "each rank take each step",
    ),
    "the epoch told once": ([SAVED, (LOOP, "sampler.set_epoch(1)\n" + LOOP)], "told, and when"),
    "an order for each rank": (
        [SAVED, (LOOP, LOOP + "    sampler.set_epoch(2 * epoch + rank)\n")],
        "out of the same order",
    ),
    "the wrapper's state": ([TOLD], "Whose state do you save"),
    "a new model": (
        [TOLD, ("model.state_dict()", "torch.nn.Linear(1, 1).state_dict()")],
        "that you trained",
    ),
}


@pytest.mark.parametrize(("changes", "question"), WRONG.values(), ids=WRONG)
def test_a_wrong_repair_is_refused_with_a_question_that_leads_on(script, changes, question):
    with pytest.raises(Wrong, match=question):
        checks.script_repaired(lambda: ({"B", "E"}, repaired(script, *changes)))


def test_a_repair_whose_faults_are_named_wrongly_is_refused(script):
    with pytest.raises(Wrong, match="letters B, F"):
        checks.script_repaired(lambda: ({"B", "F"}, repaired(script, TOLD, SAVED)))
    with pytest.raises(Wrong, match="What does your function return"):
        checks.script_repaired(lambda: None)


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("B: a new order is missing; E: names", "BE"),
        ("B and E", "BE"),
        ("(b) (e)", "BE"),
        ("BE", "BE"),
        ("{'b', 'e'}", "BE"),
        ("A: a seed for each rank; F", "AF"),
        ("a bad deed", ""),
        ("", ""),
    ],
)
def test_letters_are_read_in_any_form_and_not_out_of_words(text, letters):
    assert checks.letters_in(text) == set(letters)


# The data, and the names that are invented


@pytest.mark.parametrize(
    ("content", "said"),
    [("name,count\nbella,2\nzoë,1\n", "'zoë' has 'ë'"), ("name,count\n", "holds no names")],
)
def test_names_that_cannot_be_learned_are_refused(pets, tmp_path, content, said):
    (tmp_path / "names.csv").write_text(content)
    with pytest.raises(ddp.Error, match=said):
        pets["read_names"](tmp_path / "names.csv")


def test_every_window_of_a_name_is_followed_by_its_next_character(pets):
    contexts, targets = pets["windows"](["luna"])
    spelled = ["".join(pets["ALPHABET"][code] for code in row) for row in contexts]
    assert spelled == ["********", "*******l", "******lu", "*****lun", "****luna"]
    assert "".join(pets["ALPHABET"][code] for code in targets) == "luna+"


def test_no_invented_name_is_short_rare_or_registered(pets):
    model = pets["NameModel"](layers=1, hidden=8)  # untrained: it writes anything
    registered = set(pets["table"]["name"])
    for name in pets["invent"](model, count=5_000):
        assert re.fullmatch("[a-z]+", name) and name not in registered
        assert len(re.findall("[aeiouy]+", name)) >= 3
    assert pets["is_familiar"]("marabella")
    for refused in ("sam", "bella", "mara bella", "xqzaxqoxqu"):
        assert not pets["is_familiar"](refused)
