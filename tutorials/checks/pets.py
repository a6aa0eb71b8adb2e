"""The checks of `pets`: a resume by hand; a run that was killed; a training with two faults."""

import io
import json
import os
import re
import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset, get_worker_info

import ddp_common as ddp
from tutorials.checks.common import Wrong

REPOSITORY = Path(__file__).parents[2]

# Settings that decide which windows there are, and arguments of the notebook's `train`
OF_DATA = ("data", "repeat", "seed")
OF_TRAINING = ("epochs", "batch_size", "learning_rate", "layers", "hidden", "seed")


# The prediction

REPLIES = {
    "same": "Right: no weight differs",
    "close": "Not right: no weight differs. On the same number of ranks, the sums are done in the "
    "same order",
    "different": "Not right: no weight differs. The lost steps are trained again with the same "
    "batches, since the sampler was saved, too",
}


def prediction(said: object) -> str:
    """What is to be said of a prediction, whatever its spelling."""
    if said is None or said is ...:
        return "you have made no prediction: section 5. No weight differs"
    words = set(re.findall("[a-z]+", str(said).lower()))
    if "rounding" in words:
        words.add("close")
    meant = [word for word in REPLIES if word in words]
    if len(meant) != 1 or words & {"not", "no", "never"}:
        return f"you predicted {said!r:.60}: is that same, close or different? No weight differs"
    return f"you predicted {meant[0]!r}. {REPLIES[meant[0]]}"


# Exercise A: a resume by hand

STOPS = (25, 40), (10, 15)  # steps of the first call, and of both: as in the text, and others
THIRD = 7  # steps of a third call


def resumed(answer, *, network, surprise, windows):
    """`answer(until, file)` trains up to a step, and goes on from `file` if it is there.

    `network`, a class, `surprise` and `windows` are the notebook's: what its loop trains.
    """
    for first, both in STOPS:

        def expected(until):
            return by_the_loop(until, network, surprise, windows)

        resumed_at(answer, first, both, expected)
    first, both = STOPS[0]
    return f"{both - first} steps after the stop, and the weights of one call, bit for bit"


def by_the_loop(until, network, surprise, windows):
    """The weights after the loop of the exercise, as it is given."""
    torch.manual_seed(0)
    model = network(layers=1, hidden=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(until):
        loss = surprise(model, windows[16 * step : 16 * (step + 1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights_of(model)


def resumed_at(answer, first, both, expected):
    """Raise Wrong unless `answer` makes `first` steps, then the others of `both`, as at once.

    After a third call, too, the weights must be those of the loop, `expected(until)`.
    """
    steps = []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(None))
    needs = "a file with all that the next call needs"

    def go_on(until, done, file):
        steps.clear()
        try:
            weights = weights_of(answer(until, file))
        except FileNotFoundError as error:
            yours = f"the next call also needs {Path(str(error.filename)).name}"
            question = "Is all that gap 1 needs in `file`? The check has moved it elsewhere."
            raise Wrong(yours, needs, question) from None
        if len(steps) != until - done:
            question = "From which step does your loop go on? Is it in the file?"
            if len(steps) == until:
                question = "Who tells the next call that steps were done? Does it load the file?"
            yours = f"after a stop at step {done}, the next call makes {len(steps)} steps"
            raise Wrong(yours, f"the {until - done} that are left of {until}", question)
        return weights

    try:
        with tempfile.TemporaryDirectory() as folder:
            at_once, file = Path(folder, "at-once.pt"), Path(folder, "stopped.pt")
            moved = Path(folder, "elsewhere", "moved.pt")
            undisturbed = weights_of(answer(both, at_once))
            if not at_once.is_file():
                question = "Which function of torch writes one, and under which name?"
                raise Wrong("nothing is written yet to the file", needs, question)
            if not are_close(undisturbed, expected(both), 1e-6):
                question = "Which of the given lines does something else now?"
                raise Wrong("other weights after one call", "those of the given loop", question)
            stopped = weights_of(answer(first, file))
            moved.parent.mkdir()
            file.rename(moved)  # what a second call needs is in the file, and nowhere else
            again = go_on(both, first, moved)
            if not differing(stopped, again):
                question = "Whose weights does the optimizer change? Which model is returned?"
                yours = "after the second call, the weights are those of the first"
                raise Wrong(yours, "weights that more steps have changed", question)
            if off := differing(undisturbed, again):
                question = "What does Adam keep for each weight? Which states have you saved and "
                question += "loaded? Does each step take its own windows?"
                raise Wrong(f"{off} final weights differ from those of one call", "none", question)
            third = go_on(both + THIRD, both, moved)
            if not are_close(third, expected(both + THIRD), 1e-6):
                question = "Does the second call save all that it knows, under the same name?"
                raise Wrong("other weights after a third call", "those of one call", question)
    finally:
        hook.remove()


def weights_of(model):
    if not isinstance(model, nn.Module):
        raise Wrong(f"it returns {model!r:.60}", "the model", "Is the last line still there?")
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def differing(one, other):
    """How many weights differ."""
    return sum(int((one[name] != other[name]).sum()) for name in one)


# Exercise B: a run that was stopped, killed and resumed


def resumed_by_hand(answer, *, client, train, windows, notebook):
    """`answer()` is the directory of a run of `make run TUTORIAL=pets`, a str or a Path.

    It is compared with a run that nobody disturbs, of the notebook's `train`, with its windows.
    `notebook` is its settings.
    """
    given = answer()
    folder = REPOSITORY / str(given).strip()  # an absolute path stays itself
    if not (folder / "config.json").is_file() or not (folder / "log.txt").is_file():
        question = "After 'Run directory:', what did `make run` print?"
        raise Wrong(repr(given), "a run directory with config.json and log.txt", question)
    is_own = folder.resolve().is_relative_to(REPOSITORY) or folder.stat().st_uid == os.getuid()
    if not is_own:
        question = "Which run have you stopped yourself?"
        raise Wrong("another user's run, outside of this clone", "a run of yours", question)
    log = (folder / "log.txt").read_text()
    for event, happened, question in events_in(log):
        if not happened:
            raise Wrong(f"a log without this event: {event}", "all events", question)
    processes = set(re.findall(r"rank 1 started: process (\d+)", log))
    starts = {json.loads(line).get("restart") for line in open(folder / "metrics.jsonl")}
    if len(processes) < 3 or len(starts) < 2:
        yours = f"a log with {len(processes)} process(es) of rank 1, and reports of {len(starts)}"
        question = "Each start has new processes. Is that all that the run wrote?"
        raise Wrong(yours, "one for the start, and one for each resume", question)
    config = json.loads((folder / "config.json").read_text())
    settings = config["settings"]
    for name in OF_DATA:
        here = getattr(notebook, name)
        if settings[name] != here:
            question = "The check has the names of this notebook. What else did you set?"
            raise Wrong(f"a run with {name}={settings[name]}", f"{name}={here}", question)
    yours = final_weights(folder)
    chosen = {name: settings[name] for name in OF_TRAINING}
    options = {"workers": len(config["workers"]), "directory": False}
    with redirect_stdout(io.StringIO()):
        expected = ddp.launch(client, train, windows=windows, **chosen, **options).result
    if not are_equal(yours, expected):
        question = "Did you change a setting, or the number of ranks, when you resumed?"
        raise Wrong("other final weights", "those of an undisturbed run", question)
    return "stopped, killed, resumed, and the weights of an undisturbed run, bit for bit"


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def events_in(log):
    """What must be in a log, in words; whether it is there; what to ask if not."""
    stopped, killed, resumed = "from the keyboard", "was killed by SIGKILL", "Resumed from step"

    def has(*events):  # in this order, whatever else came between
        return re.search(".*".join(events), log, re.DOTALL) is not None

    between = [stopped, resumed, killed], [killed, resumed, stopped]
    return [
        ("interrupted by Ctrl-C", has(stopped), "Did the run finish before you came?"),
        (
            "a rank was killed",
            has(killed),
            "Which process did you kill, and how? `kill` without -9 only asks it to leave. Or had "
            "the run finished already?",
        ),
        (
            "resumed after the first of the two",
            any(has(*events) for events in between),
            "Was there a checkpoint? Which command did the terminal print?",
        ),
        (
            "resumed after the second",
            any(has(*events, resumed) for events in between),
            "Which command did the terminal print after the run had failed?",
        ),
        ("finished", log.rfind("finished:") > log.rfind(resumed), "Is it still training?"),
    ]


def final_weights(folder):
    """The weights in the newest checkpoint of a run directory: {name: tensor}."""
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    return torch.load(newest, map_location="cpu", weights_only=True)["model"]


# Exercise C: a training with two faults

BATCH = 4  # samples of a rank in a step of `broken`


class Data(TensorDataset):
    """Samples that note who asks for them, in a file; the input of sample i is i / n."""

    def __init__(self, samples, file=None):
        x = torch.arange(samples)[:, None] / samples
        super().__init__(x, 1 - 2 * x)
        self.file = file

    def __getitem__(self, index):
        worker = getattr(get_worker_info(), "id", 0)  # a loader may have workers
        asked = torch.arange(len(self))[index].flatten().tolist()
        if self.file is not None:
            with open(self.file, "a") as file:
                file.write("".join(f"{worker} {number}\n" for number in asked))
        return super().__getitem__(index)


def orders_in(file, epochs):
    """The numbers of the samples in the order in which training took them, by epoch.

    With several loader workers, batch k is made by worker k % workers. Before the first
    batch `ddp.DataLoader` has the first worker fetch a sample, another, and the first
    one again, to compare ranks: no training takes these.
    """
    asked = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
    firsts = [place for place, (worker, _) in enumerate(asked) if worker == 0][:3]
    is_compared = len(firsts) == 3 and asked[firsts[0]] == asked[firsts[2]]
    if is_compared:
        asked = [each for place, each in enumerate(asked) if place not in firsts]
    share, orders = max(1, -(-len(asked) // epochs)), []
    for start in range(0, len(asked), share):
        epoch = asked[start : start + share]
        of_worker = defaultdict(list)
        for worker, number in epoch:
            of_worker[worker].append(number)
        batches = {
            worker: [numbers[begin : begin + BATCH] for begin in range(0, len(numbers), BATCH)]
            for worker, numbers in of_worker.items()
        }
        workers = sorted(batches)
        if is_compared and start == 0:  # that was the first worker's turn
            workers = [*workers[1:], *workers[:1]]
        turns = zip_longest(*(batches[worker] for worker in workers), fillvalue=[])
        orders.append([number for turn in turns for batch in turn for number in batch])
    return orders


@dataclass
class Seen:
    """What a rank did: samples in their order, by epoch; what it returned, and its DDP model."""

    orders: list
    returned: object
    trained: dict | None  # the weights within the last DDP model, None if there was none


def watched(client, train, *, samples, seed, epochs=3):
    """Launch `train(data, seed)` on two ranks; returns what each has `Seen`, a list."""
    options = {"workers": 2, "directory": False, "stall_timeout": 15}
    run = ddp.launch(
        client, _watch, train=train, samples=samples, seed=seed, epochs=epochs, **options
    )
    return run.result


def _watch(train, samples, seed, epochs):
    """What `watched` has each rank do."""
    models, wrap = [], DistributedDataParallel.__init__

    def __init__(self, module, *arguments, **named):
        wrap(self, module, *arguments, **named)
        models.append(module)

    DistributedDataParallel.__init__ = __init__
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "asked.txt")
        file.touch()
        try:
            returned = train(Data(samples, file), seed)
        finally:
            DistributedDataParallel.__init__ = wrap
        orders = orders_in(file, epochs)
    if not isinstance(returned, dict):
        returned = repr(returned)
    mine = Seen(orders, returned, dict(models[-1].state_dict()) if models else None)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def training_repaired(answer, *, client):
    """`answer(data, seed)` trains on each rank and returns its weights, without the faults."""
    random = np.random.default_rng()
    samples, seed = 2 * int(random.integers(8, 14)), int(random.integers(1, 1_000))
    ranks = watched(client, answer, samples=samples, seed=seed)
    look_at_weights(ranks)
    look_at_orders(ranks, samples)
    look_at_replicas(ranks)
    look_at_steps(ranks, samples, seed)
    look_at_seed(ranks, watched(client, answer, samples=samples, seed=seed + 1_000))
    return "each epoch has its own order, the replicas agree, anybody can load the weights"


def look_at_weights(ranks):
    """Raise Wrong unless each rank returns the weights under the model's own names."""
    for rank, seen in enumerate(ranks):
        if not isinstance(seen.returned, dict):
            yours = f"rank {rank} returns {seen.returned:.60}"
            raise Wrong(yours, "the weights, a state_dict", "What does your function return?")
        if set(seen.returned) != {"weight", "bias"}:
            yours = f"weights with the names {', '.join(map(str, seen.returned))}"
            raise Wrong(yours, "weight, bias", "Whose state do you return?")


def look_at_orders(ranks, samples):
    """Raise Wrong unless each epoch deals each sample once, in an order of its own."""
    if any(len(seen.orders) != 3 for seen in ranks):
        raise Wrong("another number of epochs", "3", "Over which samples does your loop go?")
    orders = [ranks[0].orders[epoch] + ranks[1].orders[epoch] for epoch in range(3)]
    if any(sorted(order) != list(range(samples)) for order in orders):
        question = "Do both ranks cut their shares out of the same order?"
        raise Wrong("samples that no rank saw, or both", "each sample once per epoch", question)
    different = len(set(map(tuple, orders)))
    if different < 3:
        question = "What must the sampler be told, and when?"
        raise Wrong(f"{different} different order(s) in 3 epochs", "3", question)
    if any(order == sorted(order) for order in ranks[0].orders):
        raise Wrong("samples in rising order", "a shuffled order", "What shuffles them?")


def look_at_replicas(ranks):
    """Raise Wrong unless both ranks return the same weights, those of the trained model."""
    one, other = (seen.returned for seen in ranks)
    if not are_close(one, other):
        yours = f"rank 0 ends with {told(one)}, rank 1 with {told(other)}"
        question = "Are the gradients averaged, and does each rank take each step?"
        raise Wrong(yours, "the same weights on both ranks", question)
    trained = ranks[0].trained
    if trained is not None and not are_close(one, trained):
        question = "Is the model that you return the one that you trained?"
        raise Wrong("other weights", "those after the training", question)


def look_at_steps(ranks, samples, seed):
    """Raise Wrong if the steps of `broken`, with the samples of each rank, end elsewhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        alone = nn.Linear(1, 1)
    data = Data(samples)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for epoch in range(3):
        shares = [torch.tensor(seen.orders[epoch]).split(4) for seen in ranks]
        for rows in map(torch.cat, zip(*shares)):
            x, y = (column[rows] for column in data.tensors)
            optimizer.zero_grad()
            F.mse_loss(alone(x), y).backward()
            optimizer.step()
    yours, expected = ranks[0].returned, alone.state_dict()
    if not are_close({name: value.cpu() for name, value in yours.items()}, expected, 1e-4):
        question = "Which line of `broken` did you leave out or change, besides its two faults?"
        raise Wrong(f"{told(yours)} after the training", told(expected), question)


def look_at_seed(ranks, others):
    """Raise Wrong if with another seed the samples come in the same order."""
    if [seen.orders for seen in ranks] == [seen.orders for seen in others]:
        question = "What does `broken` do with its argument `seed`?"
        raise Wrong("the same orders with another seed", "other orders", question)


def are_close(one, other, atol=1e-7):
    pairs = [(one[name], other[name]) for name in one]
    shapes = all(mine.shape == its.shape for mine, its in pairs)
    return shapes and all(torch.allclose(*pair, rtol=1e-5, atol=atol) for pair in pairs)


def told(weights):
    return ", ".join(f"{name} {value.item():.3f}" for name, value in weights.items())
