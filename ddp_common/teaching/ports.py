"""Judges a student's port of the plain loop: a script that torchrun starts on two ranks.

The script is run under `observed`, which writes down what every rank asks of torch; what it wrote
is compared with what one process would have done. Relies on `observed` and on the plain loop that
the student began with. Promises: the first thing that is wrong is told, as what was seen, what was
expected and a question; whatever the script does, the check ends.
"""

import gzip
import json
import math
import re
import runpy
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from ddp_common.files import is_file
from ddp_common.teaching.finding import Finding
from ddp_common.teaching.scripts import ScriptRun, run_script

RANKS = 2
EPOCHS_TO_REPAIR = 2  # of the script that is to be repaired
SAMPLES = 2_048  # a multiple of the batch size: no rank has to repeat a sample
TIMEOUT = 90.0  # seconds that the script may take
OBSERVED = Path(__file__).with_name("observed.py")
# What torch and gloo say on a rank whose peer is gone, or does not come
OF_A_PEER = ("gloo", "Connection", "connection", "imed out", "timeout", "peer")


@dataclass
class Rank:
    """What one rank did."""

    events: list[dict] = field(default_factory=list)
    initial: list[torch.Tensor] | None = None
    final: list[torch.Tensor] | None = None

    def all(self, event: str) -> list[dict]:
        """The events of this kind, in their order."""
        return [each for each in self.events if each["event"] == event]

    def passes(self) -> list[dict]:
        """The passes over the first loader: each with `batches`, lists of indices."""
        found: list[dict] = []
        for each in self.events:
            if each.get("loader") != 0:
                continue
            if each["event"] == "pass":
                found.append({**each, "batches": []})
            elif found:
                found[-1]["batches"].append(each["indices"])
        return found


@dataclass
class Observed:
    """What the script did, what it should do, and the digits that it was given."""

    run: ScriptRun
    ranks: list[Rank]
    plain: dict = field(default_factory=dict)  # the names of the plain loop
    digits: torch.Tensor | None = None  # (n, 784), floats

    def each(self, event: str) -> list[list[dict]]:
        """The events of this kind, rank by rank."""
        return [rank.all(event) for rank in self.ranks]


def check(script: str | Path, plain: Path, images: torch.Tensor) -> bool:
    """Run `script`, a path, on two ranks and print whether it is a port of the script `plain`.

    It is given the path of a file with `SAMPLES` digits drawn from `images`, (n, 28, 28) uint8.
    """
    path = _path_of(script)
    if path is None:
        return False
    finding = first_fault(observe(path, plain, images))
    if finding is not None:
        print(finding)
        return False
    print("right: two ranks, one training")
    print("  the shards partition the digits in every epoch, and no two epochs deal alike")
    print("  the replicas are equal, bit for bit; every step is that of one process")
    print("  one file was written, by rank 0, with the names of the model itself")
    print("  (its lines for GPUs were not tried: the check hides them)")
    return True


def _path_of(script):
    """The path of a student's script; None, and a printed line, if there is no such file."""
    if isinstance(script, (str, Path)) and is_file(Path(script)):
        return Path(script)
    print(f"not yet: {script!r:.80} is not the path of a file. Where have you saved your script?")
    return None


def observe(script: Path, plain: Path, images: torch.Tensor) -> Observed:
    """Run the script on digits drawn at random; returns what each rank did."""
    drawn = images[torch.randperm(len(images))[:SAMPLES]]
    with tempfile.TemporaryDirectory(prefix="ddp-port-") as name:
        folder = Path(name)
        digits = folder / "digits-images-idx3-ubyte.gz"
        digits.write_bytes(gzip.compress(_idx(drawn), 1))
        records = folder / "records"
        records.mkdir()
        arguments = [str(records), str(script.resolve()), str(digits)]
        run = run_script(OBSERVED, *arguments, ranks=RANKS, timeout=TIMEOUT)
        ranks = [_rank(records, number) for number in range(RANKS)]
    names = runpy.run_path(str(plain), run_name="plain_loop")
    return Observed(run, ranks, names, drawn.flatten(1).float() / 255)


def _idx(images):
    header = b"\0\0\x08\x03" + b"".join(size.to_bytes(4) for size in images.shape)
    return header + images.numpy().tobytes()


def _rank(records, number):
    lines = records / f"rank-{number}.jsonl"
    whole = []
    if lines.exists():  # the last line may have been cut off
        for line in lines.read_text().splitlines():
            try:
                whole.append(json.loads(line))
            except ValueError:
                break
    initial, final = (
        torch.load(place, weights_only=True) if place.exists() else None
        for place in (records / f"initial-{number}.pt", records / f"final-{number}.pt")
    )
    return Rank(whole, initial, final)


def first_fault(observed: Observed) -> Finding | None:
    """The first thing that is wrong, in the order in which one would repair it; or None."""
    for find in (
        _process_group,
        _known_errors,
        _own_errors,
        _collectives,
        _steps,
        _end,
        _wrapper,
        _sampler,
        _epochs,
        _batch_size,
        _partition,
        _deals,
        _optimizer,
        _replicas,
        _one_process,
        _saving,
        _saved_names,
        _farewell,
    ):
        finding = find(observed)
        if finding is not None:
            return finding
    return None


def _errors(observed):
    """(rank, event) of what was raised by a rank itself, not for want of its peer."""
    return [
        (number, error)
        for number, errors in enumerate(observed.each("error"))
        for error in errors
        if not any(word in error["text"] for word in OF_A_PEER)
    ]


def _process_group(observed):
    joined = sum(bool(calls) for calls in observed.each("joining"))
    if not joined and observed.run.timed_out:
        return None  # whatever it did instead: `_end` tells
    unknown = [
        error for _, error in _errors(observed) if "process group" not in error["text"].lower()
    ]
    if joined == RANKS or (unknown and not joined):
        return None
    return Finding(
        f"{joined} of {RANKS} ranks called init_process_group",
        f"all {RANKS}",
        "What must every process do before it can talk to the others?",
    )


def _known_errors(observed):
    for number, error in _errors(observed):
        if "mutually exclusive with shuffle" in error["text"]:
            return Finding(
                "DataLoader(..., sampler=..., shuffle=True), which it refuses",
                "one of the two decides about the order",
                "Who shuffles now, the loader or its sampler?",
            )
        if "device_ids" in error["text"]:
            return Finding(
                "DDP refuses these device_ids for a model on the CPU",
                "device_ids=[local_rank] for a model on a GPU, None for one on the CPU",
                "On which device are the parameters of this run?",
            )
    return None


def _own_errors(observed):
    for number, error in _errors(observed):
        message = (error["text"].splitlines() or [""])[0]
        return Finding(
            f"rank {number} raised {error['type']}: {message}".rstrip(": "),
            "an end without an error",
            "Which of your lines is the last in its traceback?\n"
            + _last_lines(observed.run.output, f"[rank{number}]"),
        )
    return None


def _last_lines(output, with_this=""):
    """The last lines of the output that hold `with_this`, as much as fits on a page."""
    lines = [line for line in output.splitlines() if line.strip() and with_this in line]
    return "\n".join(f"  {line[:160]}" for line in lines[-6:])


def _steps(observed):
    """As many on each rank? Who waits for a rank that has stopped has begun one more."""
    counts = [len(backwards) for backwards in observed.each("backward")]
    if not max(counts):
        if observed.run.timed_out:
            return None  # `_end` tells
        return Finding(
            "no rank called backward()",
            "as many steps on each rank",
            "Is main() called? Is the loop still there?",
        )
    if len(set(counts)) == 1:
        return None
    seen = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
    return Finding(
        f"backward() is called so often: {seen}",
        "the same number on each rank",
        "DDP averages in every step. Who answers the rank that makes one more?",
    )


def _different_calls(observed):
    """(name, counts) of a collective call that the ranks did not make equally often, or None."""
    counts = [Counter(call["name"] for call in calls) for calls in observed.each("call")]
    for name in sorted(set().union(*counts)):
        each = [count[name] for count in counts]
        if len(set(each)) > 1:
            return name, each
    return None


def _collectives(observed):
    different = _different_calls(observed)
    if different is None:
        return None
    name, counts = different
    seen = ", ".join(f"{count} times on rank {rank}" for rank, count in enumerate(counts))
    return Finding(
        f"{name} is called {seen}",
        "every rank makes the same collective calls, in the same order",
        f"Under which `if` does this {name} stand, and for whom does it wait?",
    )


def _end(observed):
    if observed.run.ok:
        return None
    how = (
        f"it was ended after {TIMEOUT:g} s"
        if observed.run.timed_out
        else f"torchrun ended with code {observed.run.exit_code}"
    )
    return Finding(
        how,
        "it ends by itself, with code 0",
        "What did each rank do last?\n" + _last_lines(observed.run.output),
    )


def _wrapper(observed):
    wrapped = [len(each) for each in observed.each("wrap")]
    if not all(wrapped):
        return Finding(
            "the model is not wrapped in DistributedDataParallel",
            "DDP averages the gradients of the ranks in each backward()",
            "Two ranks train on different digits. What keeps their weights equal?",
        )
    forwards = [len(each) for each in observed.each("forward")]
    backwards = [len(each) for each in observed.each("backward")]
    if any(forward < backward for forward, backward in zip(forwards, backwards)):
        return Finding(
            f"{backwards[0]} times backward(), {forwards[0]} times a call of the wrapped model",
            "the wrapped model is called in every step",
            "Which of the two models computes the loss, the wrapped one or the one inside?",
        )
    return None


def _sampler(observed):
    passes = observed.ranks[0].passes()
    if not passes:
        return Finding(
            "no DataLoader was iterated over",
            "the loader of the plain loop, with another sampler",
            "Which object deals the digits to the ranks?",
        )
    if passes[0]["sampler"] != "DistributedSampler":
        return Finding(
            f"the loader's sampler is a {passes[0]['sampler']}",
            "a DistributedSampler",
            "Which digits does rank 1 take that rank 0 does not?",
        )
    return None


def _epochs(observed):
    expected = observed.plain["EPOCHS"]
    for number, rank in enumerate(observed.ranks):
        if len(rank.passes()) != expected:
            return Finding(
                f"rank {number} passes over the digits {len(rank.passes())} times",
                f"{expected} times, as the plain loop",
                "Has the number of epochs to change, when each rank takes a share of each?",
            )
    return None


def _batch_size(observed):
    expected = observed.plain["BATCH_SIZE"]
    first = [rank.passes()[0]["batches"][0] for rank in observed.ranks]
    together = sum(len(batch) for batch in first)
    if together == expected:
        return None
    each = " + ".join(str(len(batch)) for batch in first)
    return Finding(
        f"a step takes {each} = {together} digits",
        f"{expected}, the batch of the plain loop",
        "batch_size is what one rank takes. How large is the batch that the optimizer sees?",
    )


def _partition(observed):
    for epoch in range(observed.plain["EPOCHS"]):
        shards = [
            [index for batch in rank.passes()[epoch]["batches"] for index in batch]
            for rank in observed.ranks
        ]
        counted = Counter(index for shard in shards for index in shard)
        twice = sum(count > 1 for count in counted.values())
        missing = SAMPLES - len(counted)
        if twice or missing:
            return Finding(
                f"in epoch {epoch}, {twice} digits are taken twice and {missing} never",
                f"each of the {SAMPLES} once",
                "From where does your sampler know the rank, and how many ranks there are?",
            )
    return None


def _deals(observed):
    for rank in observed.ranks:
        orders = [tuple(map(tuple, each["batches"])) for each in rank.passes()]
        if len(set(orders)) == len(orders):
            continue
        dealt = [index for batch in orders[0] for index in batch]
        if dealt == sorted(dealt):
            return Finding(
                "the digits come in the order of the file, in every epoch",
                "another order in every epoch",
                "The plain loop shuffles. Who does so in yours?",
            )
        return Finding(
            "every epoch deals the same batches",
            "another order in every epoch",
            "The sampler shuffles from (seed, epoch). Who tells it the epoch?",
        )
    return None


def _optimizer(observed):
    expected = observed.plain["LEARNING_RATE"]
    for steps in observed.each("step"):
        rates = {step["lr"] for step in steps}
        if not rates:
            return Finding(
                "the optimizer takes no step",
                "one after each backward()",
                "Who changes the weights?",
            )
        if rates != {expected}:
            seen = ", ".join(f"{rate:g}" for rate in sorted(rates))
            return Finding(
                f"a learning rate of {seen}",
                f"{expected:g}, as in the plain loop",
                "The batch of all ranks together is as large as before. "
                "Why should the step be another?",
            )
    return None


def _replicas(observed):
    finals = [rank.final for rank in observed.ranks]
    if all(final is not None for final in finals) and all(
        torch.equal(mine, other) for mine, other in zip(*finals)
    ):
        return None
    return Finding(
        "after the last step the ranks hold different weights",
        "equal ones, bit for bit",
        "Does something change the weights or the gradients after DDP has averaged them?",
    )


def _one_process(observed):
    """Compare with one process that starts with the same weights and takes the same batches."""
    model = observed.plain["autoencoder"]()
    first = observed.ranks[0]
    for parameter, initial in zip(model.parameters(), first.initial):
        parameter.data.copy_(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=observed.plain["LEARNING_RATE"])
    expected = []
    for passes in zip(*(rank.passes() for rank in observed.ranks)):
        for shares in zip(*(each["batches"] for each in passes)):
            batch = observed.digits[[index for share in shares for index in share]]
            loss = F.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    losses = [[each["loss"] for each in backwards] for backwards in observed.each("backward")]
    yours = [sum(each) / len(each) for each in zip(*losses)]
    for step, (mine, alone) in enumerate(zip(yours, expected)):
        if abs(mine / alone - 1) > 1e-3:
            return Finding(
                f"a mean loss of {mine:.4f} over the ranks in step {step}",
                f"{alone:.4f}, that of one process with the same digits",
                "Which of loss, gradient and step did you change on the way?",
            )
    off = max(
        (mine - alone).abs().max().item() for mine, alone in zip(first.final, model.parameters())
    )
    if off > 1e-3:
        return Finding(
            f"in the end a weight differs by {off:.1g} from that of one process",
            "less than 0.001",
            "DDP averages the gradients. Is anything divided, multiplied or clipped once more?",
        )
    return None


def _saving(observed):
    savers = [len(saves) for saves in observed.each("save")]
    files = {save["file"] for saves in observed.each("save") for save in saves}
    if None in files:
        return Finding(
            "torch.save writes into something that is no file",
            "a path, or a file that is open",
            "Where does the plain loop save?",
        )
    if savers[0] and not any(savers[1:]) and len(files) == 1:
        return None
    if not any(savers):
        return Finding(
            "no rank saved anything", "rank 0 saves", "What is left of this training tomorrow?"
        )
    if sum(bool(count) for count in savers) > 1:
        return Finding(
            f"torch.save is called on {sum(bool(count) for count in savers)} ranks",
            "on rank 0 alone",
            "All ranks hold the same weights. What happens when two write one file?",
        )
    if not savers[0]:
        return Finding(
            f"rank {next(rank for rank, count in enumerate(savers) if count)} saves",
            "rank 0 saves",
            "How many ranks are there on a machine with one GPU, and which is always there?",
        )
    return Finding(f"rank 0 writes {len(files)} files", "one", "Which of them is the model?")


def _saved_names(observed):
    file = Path(observed.ranks[0].all("save")[-1]["file"])
    try:
        state = torch.load(file, weights_only=True)
        names = list(state)
    except Exception as error:  # a whole model, a folder that is gone: whatever was saved
        return Finding(
            f"torch.load(file, weights_only=True) raises {type(error).__name__}",
            "the state_dict() of the model",
            "What did the plain loop save?",
        )
    model = observed.plain["autoencoder"]()
    expected = list(model.state_dict())
    if names != expected:
        return Finding(
            f"the file holds {names[0]!r} and {len(names) - 1} others",
            f"{expected[0]!r} and {len(expected) - 1} others, as the model itself names them",
            "Whose state_dict() did you save, the wrapper's or that of the model inside?",
        )
    saved = [state[name] for name, _ in model.named_parameters()]
    if not all(torch.equal(mine, other) for mine, other in zip(saved, observed.ranks[0].final)):
        return Finding(
            "the saved weights are not those after the last step",
            "the trained weights",
            "When is the file written?",
        )
    return None


def _farewell(observed):
    left = [rank for rank, calls in enumerate(observed.each("destroy")) if not calls]
    if not left:
        return None
    return Finding(
        f"rank {left[0]} ends with its process group still open",
        "each rank closes its own, as the last it does",
        "What is the counterpart of init_process_group?",
    )


def check_mean_loss(script: str | Path | None) -> bool:
    """Run `script` on two ranks; print whether it prints the mean loss of both in each epoch.

    It is given a seed. A line of it is 'epoch E: mean loss L'.
    """
    path = _path_of(script)
    if path is None:
        return False
    with tempfile.TemporaryDirectory(prefix="ddp-port-") as name:
        arguments = [name, str(path.resolve()), str(int(torch.randint(10**6, ())))]
        run = run_script(OBSERVED, *arguments, ranks=RANKS, timeout=TIMEOUT)
        ranks = [_rank(Path(name), number) for number in range(RANKS)]
    observed = Observed(run, ranks)
    for find in (_process_group, _own_errors, _collectives, _steps, _end, _wrapper, _mean_losses):
        finding = find(observed)
        if finding is not None:
            print(finding)
            return False
    print("right: both ranks call, one prints, and it is the mean of both")
    return True


def _mean_losses(observed):
    printed = re.findall(r"epoch (\d+): mean loss (\S+)", observed.run.output)
    losses = [[each["loss"] for each in backwards] for backwards in observed.each("backward")]
    steps = len(losses[0]) // EPOCHS_TO_REPAIR
    expected = [
        (str(epoch), sum(sum(each[epoch * steps :][:steps]) for each in losses) / steps / RANKS)
        for epoch in range(EPOCHS_TO_REPAIR)
    ]
    if [epoch for epoch, _ in printed] != [epoch for epoch, _ in expected]:
        return Finding(
            f"{len(printed)} lines 'epoch …: mean loss …'",
            f"{EPOCHS_TO_REPAIR}, one for each epoch, in their order",
            "Which ranks print, and which need not?",
        )
    for (epoch, yours), (_, mean) in zip(printed, expected):
        if not abs(_number(yours) - mean) < 1e-3:  # also if it is no number
            return Finding(
                f"a mean loss of {yours} in epoch {epoch}",
                f"{mean:.4f}, over the steps of both ranks",
                "Whose losses are in your sum, and by what is it divided?",
            )
    return None


def _number(text):
    try:
        return float(text)
    except ValueError:
        return math.nan
