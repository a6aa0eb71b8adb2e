"""The checks of `gpt`: buckets, four slow runs, the bytes of a rank; and two predictions.

What an answer says is compared with what real ranks do: a communication hook counts buckets, runs
are timed, bytes are counted.
"""

import functools
import math
import numbers
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from tutorials import gpt_steps as steps
from tutorials.checks.common import Wrong

NOTHING = "nothing is written yet"
ON_TWO: dict[str, Any] = {"workers": 2, "directory": False, "stall_timeout": 60}


def number(answer: object, expected: object, question: str) -> float:
    """A number that an answer has returned. Raises `Wrong` for anything else."""
    if answer is None or answer is ...:
        raise Wrong(NOTHING, expected, question)
    if isinstance(answer, torch.Tensor) and answer.numel() == 1:
        answer = answer.item()
    real = isinstance(answer, numbers.Real) and not isinstance(answer, bool)
    if not real or not math.isfinite(answer):
        raise Wrong(f"{answer!r:.80}", f"a number, {expected}", "What does your function return?")
    return float(answer)


# The predictions


def prediction(kind: str, said: object, measured: float = math.nan) -> str:
    """The reply to a prediction of "strong scaling", "weak scaling" or "memory"."""
    return _of_memory(said) if kind == "memory" else _of_scaling(kind, said, measured)


def _of_scaling(kind: str, said: object, measured: float) -> str:
    """The reply to a predicted speed-up."""
    seen = f"{kind}: measured {measured:.2f}"
    if said is None or said is ...:
        return f"{seen}; you have made no prediction: section 3"
    text = ",".join(map(str, said)) if isinstance(said, tuple) else str(said)  # 1,9 is a tuple
    found = re.search(r"\d+([.,]\d+)?|[.,]\d+", text)
    if not found or isinstance(said, bool):
        return f"{seen}; you predicted {said!r:.40}: how many times is that, as a number?"
    predicted = float(found[0].replace(",", "."))
    if "%" in str(said):
        predicted /= 100
    if abs(predicted - measured) <= 0.15:
        return f"{seen}; you predicted {predicted:g}: right"
    if measured < 1:
        reason = "two ranks were slower than one. Has another program used the cores? Run it again"
    elif predicted > 2:
        reason = "two ranks compute at most twice as much. What would make a rank faster?"
    elif predicted > measured and kind == "strong scaling":
        reason = "each rank has half of the rows. What does a step do that does not become half?"
    elif predicted > measured:
        reason = "each rank has as much to compute as one alone. What comes on top of it?"
    elif predicted <= 1:
        reason = "then the second rank would be useless. How long is sending, beside computing?"
    else:
        reason = "a part of the sending is hidden. Behind what?"
    return f"{seen}; you predicted {predicted:g}: {reason}"


KINDS = {  # what a prediction may say: the words that mean it
    "parameters": ("param", "weight"),
    "gradients": ("grad",),
    "Adam": ("adam", "optim", "mean"),
    "buckets": ("bucket",),
    "activations": ("activ",),
}
ON_MEMORY = {
    "parameters": "look at the first row: no other kind is smaller",
    "gradients": "each parameter has one gradient. Which kind has two numbers for a parameter?",
    "Adam": "it is the largest that does not depend on the batch. Which kind does?",
    "buckets": "they are a second copy of the gradients. Which kind grows with the batch?",
    "activations": "right. With one window in place of 16, Adam would be the largest",
}


def _of_memory(said: object) -> str:
    """The reply to a prediction of the largest kind of memory."""
    if said is None or said is ...:
        return "you have made no prediction of the largest kind"
    meant = [kind for kind, words in KINDS.items() if any(w in str(said).lower() for w in words)]
    if len(meant) != 1:
        return f"you predicted {said!r:.60}: which one of {', '.join(KINDS)} is that?"
    return f"you predicted {meant[0]}: {ON_MEMORY[meant[0]]}"


# Exercise A: buckets


class Chain(nn.Module):
    """Parameters of such numbers of elements. Backward reaches the last one first."""

    def __init__(self, elements):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(count) for count in elements)

    def forward(self, x):
        for part in self.parts:
            x = x + part.mean()
        return x.sum()


# Elements of parameters, in their order, and a size in MiB: cases where an edge decides
MIB = 2**18  # elements
CHAINS = [
    ([MIB, MIB, MIB], 1),  # each is full exactly
    ([MIB, 3 * MIB, MIB // 2], 1),  # a parameter that is larger than a bucket
    ([MIB // 2, MIB // 2, MIB // 2, MIB // 2], 1),  # full exactly: closed, and nothing is left
    ([3 * MIB, MIB], 2),  # from the front there were two
    ([MIB // 4, MIB, MIB, MIB // 4], 1),
    ([250_000] * 3, 1),  # a MB is less than a MiB
    ([1], 25),
]


SENT: dict = {}  # by client and model: what `_count_buckets` has returned


def _count_buckets(model, rows, caps, chains):
    """On a rank: how many buckets DDP sends for the model, by cap, and for each chain."""
    device, counts = ddp.device(), []
    cases = [(model(), rows, cap) for cap in caps]
    cases += [(Chain(elements), torch.ones(1), cap) for elements, cap in chains]
    for module, given, cap in cases:
        buckets, wrapped = steps.Buckets(), DDP(module.to(device), bucket_cap_mb=cap)
        wrapped.register_comm_hook(None, buckets.average)
        for _ in range(2):  # the first step has one bucket
            wrapped(given.to(device)).backward()
        counts.append(len(buckets.buffers))
    return counts


def buckets(answer, *, client, model, rows) -> str:
    """`answer(sizes, bucket_cap_mb)` is the number of buckets of a DDP model.

    `model()` makes the notebook's; `rows` is an input of it.
    """
    caps = (1, 5, 25)
    sizes = [parameter.nbytes for parameter in model().parameters()]
    question = "Which parameters come first, and when is a bucket closed?"
    yours = [number(answer(list(sizes), cap), "of buckets", question) for cap in caps]
    if (client, model) not in SENT:  # what ranks send does not depend on the answer
        given = {"model": model, "rows": rows, "caps": caps, "chains": CHAINS}
        SENT[client, model] = ddp.launch(client, _count_buckets, **given, **ON_TWO).result
    seen = SENT[client, model]
    cases = [(sizes, cap) for cap in caps]
    cases += [([4 * count for count in elements], cap) for elements, cap in CHAINS]
    for given, cap in cases[len(caps) :]:
        yours.append(number(answer(list(given), cap), "of buckets", question))
    for (given, cap), mine, real in zip(cases, yours, seen):
        if mine != real:
            of = "this model with" if given is sizes else f"parameters of {_in_mib(given)} MiB,"
            raise Wrong(
                f"{mine:g} buckets of {of} bucket_cap_mb={cap}",
                f"{real}, as DDP has sent",
                _bucket_question(cases, yours),
            )
    found = ", ".join(f"{real} with {cap}" for cap, real in zip(caps, seen))
    return f"DDP sends as many messages in a step as you say: {found} MiB"


def _in_mib(sizes):
    return ", ".join(f"{size / 2**20:g}" for size in sizes)


def _bucket_question(cases, yours):
    """What to ask: of the first mistake that gives what the answer gives in each case."""
    for wrong, question in BUCKET_MISTAKES:
        if yours == [wrong(sizes, sizes[::-1], cap * 2**20) for sizes, cap in cases]:
            return question
    return "Add up the sizes from the last parameter on. When does DDP close a bucket?"


def _greedy(sizes, limit, rest=lambda filled, size: 0):
    """Full buckets, and the bytes in one that is not; `rest` is in it when one is full."""
    count, filled = 0, 0
    for size in sizes:
        filled += size
        if filled >= limit:
            count, filled = count + 1, rest(filled, size)
    return count, filled


def _all(full_and_rest):
    full, rest = full_and_rest
    return full + (rest > 0)


def _before(sizes, limit):
    """Buckets that are closed before they would exceed the limit."""
    count, filled = 0, 0
    for size in sizes:
        if filled and filled + size > limit:
            count, filled = count + 1, 0
        filled += size
    return count + (filled > 0)


OPEN = "How many bytes has a bucket that has just begun?"
DIVIDED = "May a bucket end in the middle of a parameter?"
CLOSED = "Is a bucket closed before it would be too large, or when it is large enough?"
BUCKET_MISTAKES = [  # of (sizes, sizes in reverse, limit)
    (
        lambda _, back, limit: _all(_greedy(back, limit / 2**20 * 10**6)),
        "How many bytes has a MiB?",
    ),
    (
        lambda sizes, _, limit: _all(_greedy(sizes, limit)),
        "Which parameter's gradient is ready first in backward()?",
    ),
    (
        lambda _, back, limit: _greedy(back, limit)[0],
        "What becomes of the parameters after the last full bucket?",
    ),
    (
        lambda _, back, limit: _greedy(back, limit)[0] + 1,
        "Is a bucket begun if no parameter is left?",
    ),
    (lambda sizes, _, limit: math.ceil(sum(sizes) / limit), DIVIDED),
    (lambda sizes, _, limit: sum(sizes) / limit, DIVIDED),
    (lambda sizes, _, limit: sum(sizes) // limit, DIVIDED),
    (lambda sizes, _, limit: _before(sizes, limit), CLOSED),
    (lambda _, back, limit: _before(back, limit), CLOSED),
    (
        lambda _, back, limit: _all(_greedy(back, limit + 1)),
        "Is a bucket closed that is full exactly?",
    ),
    (lambda _, back, limit: _all(_greedy(back, limit, lambda filled, _: filled - limit)), OPEN),
    (lambda _, back, limit: _all(_greedy(back, limit, lambda _, size: size)), OPEN),
]


# Exercise B: four slow runs

FASTER = 1.5  # so many times
ROUNDS = 3  # of measuring at most: other programs may have used the cores
REASONS = {
    "A": "Which bar is the longest on both ranks? What could happen at the same time?",
    "B": "The green bar is long, and it comes in each step. What makes fewer of them?",
    "C": "Rank 0 waits in each step. What does rank 1 do then that rank 0 does not?",
    "D": "A step computes for a few milliseconds, and is sent each time. What makes fewer steps?",
}


def _run(windows, clusters):
    """On a rank: seconds of each run, the least of two in turns, and spans of all ranks."""
    torch.set_num_threads(1)
    seconds = [[], []]
    for _ in range(2):
        for index, (cluster, program) in enumerate(clusters):
            seconds[index].append(steps.run_on(cluster, windows, program)[0])
    return [min(each) for each in seconds]


def _traced(windows, cluster):
    _, trace = steps.run_on(cluster, windows, steps.PROGRAM, traced=True)
    return trace.of_all_ranks()


def traced_runs(client, windows) -> dict[str, list]:
    """For each cluster the traces of both ranks, of the same program."""
    given = {"windows": windows, **ON_TWO}
    return {
        name: ddp.launch(client, _traced, cluster=name, **given).result for name in steps.CLUSTERS
    }


def four_runs(answer, *, client, windows) -> str:
    """`answer()` is for each run the one setting to change; the runs then need less time."""
    programs = {name: changed(answer(), name) for name in steps.CLUSTERS}
    faster = {}
    for name, program in programs.items():
        given = {"windows": windows, "clusters": [(name, steps.PROGRAM), (name, program)]}
        before, after = math.inf, math.inf
        for _ in range(ROUNDS):
            seconds = ddp.launch(client, _run, **given, **ON_TWO).result
            before, after = min(before, seconds[0]), min(after, seconds[1])
            if before >= FASTER * after:
                break
        faster[name] = before / after
        if faster[name] < FASTER:
            yours = f"run {name} is {faster[name]:.1f} times as fast as before"
            raise Wrong(yours, f"at least {FASTER}", REASONS[name])
    return "times as fast as before: " + ", ".join(
        f"{name} {times:.1f}" for name, times in faster.items()
    )


def changed(changes: object, name: str) -> dict:
    """The program of a run after the change. Raises `Wrong` unless it is one, and possible."""
    if changes is None or changes is ...:
        raise Wrong(NOTHING, "four settings, one for each run", REASONS["A"])
    form = '{"A": {"name of a setting": value}, …}'
    if not isinstance(changes, dict) or not isinstance(changes.get(name), dict):
        yours, question = f"{changes!r:.80}", "What does your function return?"
        if isinstance(changes, dict) and name in changes:
            yours = f"run {name}: {changes[name]!r:.40}"
        elif isinstance(changes, dict):
            yours, question = f"no change of run {name}", REASONS[name]
        raise Wrong(yours, f"{form}, for A, B, C and D", question)
    program = {**steps.PROGRAM, **changes[name]}
    if unknown := set(program) - set(steps.PROGRAM):
        known = ", ".join(steps.PROGRAM)
        raise Wrong(f"run {name}: {unknown.pop()!r:.40}", f"one of {known}", REASONS[name])
    for setting, value in program.items():
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        least = 0 if setting == "num_workers" else 1
        if setting == "log_rows":
            program[setting] = bool(value)
        elif not is_whole or not least <= value <= steps.ROWS:
            yours = f"run {name}: {setting}={value!r:.40}"
            question = "How many windows has a rank, and how many processes can a machine bear?"
            raise Wrong(yours, f"a whole number from {least} to {steps.ROWS}", question)
        else:
            program[setting] = int(value)  # torch refuses a whole number of numpy
    differ = [setting for setting in program if program[setting] != steps.PROGRAM[setting]]
    if len(differ) != 1:
        yours = f"run {name} has {len(differ)} changed settings"
        raise Wrong(yours, "one", f"It is slow for one reason. {REASONS[name]}")
    if program["average_every"] * program["batch_size"] > steps.ROWS:
        yours = f"run {name} ends before DDP averages for the first time"
        raise Wrong(yours, f"an averaging for {steps.ROWS} windows or fewer", REASONS[name])
    return program


# Exercise C: the bytes of a rank

WAYS = ("DDP", "DDP view", "FSDP2")
QUESTIONS = {
    "DDP": "Which four kinds of memory has each parameter, and of how many bytes?",
    "DDP view": "Gradients and buckets are one memory now. What is counted twice?",
    "FSDP2": "What of a parameter does each rank hold: its number, its gradient, its means?",
}


def _measured_bytes(widths, way):
    """On a rank: the parameters of a model, and the bytes of each rank after two steps."""
    device, bucket_hook = ddp.device(), steps.Buckets()
    torch.manual_seed(0)
    layers = [nn.Linear(*pair, bias=False) for pair in zip(widths, widths[1:])]
    model: nn.Module = nn.Sequential(*layers).to(device)
    parameters = sum(each.numel() for each in model.parameters())
    if way == "FSDP2":
        mesh = dist.init_device_mesh(device.type, (ddp.world_size(),))
        fully_shard(model, mesh=mesh)
    else:
        model = DDP(model, gradient_as_bucket_view=way == "DDP view")
        model.register_comm_hook(None, bucket_hook.average)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, widths[0], device=device)).square().mean().backward()
        optimizer.step()
    held = [*model.parameters(), *(each.grad for each in model.parameters())]
    held += [mean for state in optimizer.state.values() for mean in state.values()]
    return parameters, steps.of_all_ranks(steps.nbytes([*held, *bucket_hook.buffers]))


@functools.cache
def _measured(client, widths, way):
    return ddp.launch(client, _measured_bytes, widths=widths, way=way, **ON_TWO).result


def bytes_of_a_rank(answer, *, client) -> str:
    """`answer(parameters, ranks, way)` is what three models are measured to hold, and more."""
    for way, widths in zip(WAYS, ((256, 512, 64), (384, 256, 128), (512, 256, 256))):
        parameters, held = _measured(client, widths, way)
        compare(answer, parameters, 2, way, max(held), f"{max(held):,}, measured")
    for way in WAYS:  # other numbers of ranks cannot be measured on every machine
        for ranks in (1, 8, 64):
            kept = 20 if way == "DDP" else 16 / (ranks if way == "FSDP2" else 1)
            compare(answer, 64_000_000, ranks, way, 64e6 * kept, f"{64e6 * kept:,.0f}")
    fits = []
    for way in WAYS:
        models = [24e9 / float(answer(10**9, ranks, way)) for ranks in (1, 8, 64)]
        fits.append(f"  {way:8} {', '.join(f'{billions:.1f}' for billions in models)}")
    return (
        "three models hold what you say. Activations come on top, and gathered blocks with FSDP2\n"
        "  24 GB on 1, 8, 64 ranks hold so many billions of parameters:\n" + "\n".join(fits)
    )


def compare(answer, parameters, ranks, way, held, expected):
    """Raise `Wrong` unless the answer is `held`, but for Adam's counts of steps."""
    mine = number(answer(parameters, ranks, way), "of bytes", QUESTIONS[way])
    if abs(mine - held) > 0.01 * held:
        yours = f"{mine:,.0f} bytes for {parameters:,} parameters, {ranks} rank(s), {way}"
        raise Wrong(yours, expected, QUESTIONS[way])
