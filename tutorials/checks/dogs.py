"""Checks of the exercises of `dogs`: a rate for many ranks, a fair comparison, a repair."""

import itertools
import math
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ddp_common as ddp
from tutorials.checks.common import Wrong, enough_workers, named

# The predictions

AFTER_5 = {
    "worse": "right. It saw the same images, but made a sixteenth of the steps",
    "same": "not right: worse. The same images, but a sixteenth of the steps",
    "better": "not right: worse. Each step is less noisy, but there are a sixteenth of them",
}
AFTER_80 = {
    "smaller": "right. Both come to the same place; one needs more epochs",
    "larger": "not right: smaller. The batch of 8 has stopped improving, and the other has not",
    "equal": "not right: smaller. Steps are missing at the beginning, when each still matters",
}


def predicted(after_5: object, after_80: object) -> str:
    """What became of both predictions, however they are spelled."""
    pairs = (("After 5 epochs", after_5, AFTER_5), ("After 80", after_80, AFTER_80))
    return "\n".join(_reply(*pair) for pair in pairs)


def _reply(when, prediction, replies):
    if prediction is None or prediction is ...:
        return f"{when}: you have made no prediction."
    said = named(prediction, replies)
    if said is None:
        return f"{when}, you said {prediction!r}: which one of {', '.join(replies)} is that?"
    return f"{when}, you said {said}: {replies[said]}."


# Exercise A


def rate(answer):
    """Whether the rate is right, for random bases, ranks and moments. Rounding is no fault."""
    for rule, power in (("kept", 0), ("square root", 0.5), ("linear", 1)):
        for ranks in (1, random.randint(2, 5), 16):
            base, warm_up = random.uniform(0.001, 0.1), random.randint(500, 5_000)
            end = base * ranks**power
            of_rule = f"For {ranks} times the batch: what is the rule {rule!r}?"
            none = "What is the rate if there is no warm-up?"
            cases = [
                (warm_up, warm_up, end, of_rule),
                (0, warm_up, base, "With which rate does training start?"),
                (2 * warm_up, warm_up, end, "What is the rate long after the warm-up?"),
                (0, 0, end, none),
                (warm_up, 0, end, none),
            ]
            for seen in (warm_up // 3, *random.sample(range(1, warm_up), 4)):
                there = base + (end - base) * seen / warm_up
                cases.append((seen, warm_up, there, "Which share of the way is done?"))
            for seen, of_warm_up, expected, question in cases:
                yours = answer(seen, base, ranks, rule, of_warm_up)
                if not math.isclose(_number(yours), expected, rel_tol=0.01):
                    case = f"{seen=}, base={base:.4f}, {ranks=}, {rule=}, warm_up={of_warm_up}"
                    raise Wrong(f"{yours}  ({case})", f"{expected:.4f}", question)
    return "three rules, with and without a warm-up"


def _number(value):
    """A float of a number, a tensor, an array or a list of one; nan for anything else."""
    try:
        values = np.asarray(value, dtype=float).reshape(-1)
    except (TypeError, ValueError):
        return math.nan
    return float(values[0]) if len(values) == 1 else math.nan


# Exercise B


def comparison(answer):
    """Whether models are compared after equally many samples, in whole steps."""
    # it also falls: the best step so far is another one than the last
    log = {w: [100 * w + step * 17 % 41 for step in range(1, 41)] for w in (1, 2, 4)}
    for images, samples in ((10, 80), (10, 90), (10, 119), (25, 200), (3, 12)):
        # 80 is the end of a step for all workers; 90 and 119 are not, for two or for four
        def after(step_of, images=images, samples=samples):
            return {w: right[step_of(w, images, samples) - 1] for w, right in log.items()}

        wanted = after(lambda w, images, samples: samples // (w * images))
        mistakes = [
            (
                after(lambda w, images, samples: samples // images),
                "How many images has a step of several workers?",
            ),
            (
                after(lambda w, images, samples: -(-samples // (w * images))),
                "Is that step finished by then?",
            ),
            (
                after(lambda w, images, samples: round(samples / (w * images))),
                "Is that step finished by then, or only the nearest one?",
            ),
            (
                after(lambda w, images, samples: int(samples / (w * images) + 0.5)),
                "Is that step finished by then, or only the nearest one?",
            ),
            (
                after(lambda w, images, samples: samples // (w * images) + 1),
                "At which place of the list is the first step?",
            ),
        ]
        finished = {w: right[: samples // (w * images)] for w, right in log.items()}
        for together in (max, sum):
            of_several = {w: together(right) for w, right in finished.items()}
            mistakes.append((of_several, "Is that of the last finished step alone?"))
        yours = _numbers(answer({w: list(right) for w, right in log.items()}, images, samples))
        if yours == wanted:
            continue
        question = "After how many steps of its own is each at `samples` or just before?"
        if not isinstance(yours, dict) or yours.keys() != wanted.keys():
            question = "Is it a dict, with the keys of `log`?"
        question = next((asked for mistake, asked in mistakes if yours == mistake), question)
        raise Wrong(f"{yours}  ({images=}, {samples=})", wanted, question)
    return "equally many samples, and whole steps"


def _numbers(value):
    """A dict of floats of what is one; what it is, in words, for anything else."""
    try:
        return {int(key): float(each) for key, each in dict(value).items()}
    except (TypeError, ValueError):
        return repr(value)


# Exercise C


def end_of_epoch(client):
    """The check of an answer that ranks of `client` run, on random images.

    On two ranks 7 images are held out, so that one has 4 and the other 3; then 437, some batches
    for each. On three ranks 7 again.
    """

    def check(answer):
        if "evaluate" in getattr(getattr(answer, "__code__", None), "co_names", ()):
            raise Wrong("a call of `evaluate`", "a loop of your own", "How does `evaluate` end?")
        _on_ranks(client, answer, 2, held_out=7)
        _on_ranks(client, answer, 2, held_out=437)
        with enough_workers(client, 3):
            _on_ranks(client, answer, 3, held_out=7)
        return "each held-out image counts once, and all ranks decide by the same loss"

    return check


def _on_ranks(client, answer, ranks, held_out):
    """Raise `Wrong` unless the answer is right on so many ranks, for so many images."""
    given, wanted, wrong = _a_case(held_out, ranks)
    given.update(workers=ranks, directory=False, stall_timeout=30)
    seen = ddp.launch(client, _run_as_rank, answer=answer, **given).result
    pairs = [_pair(one["returned"]) for one in seen]
    for rank, (pair, one) in enumerate(zip(pairs, seen)):
        if pair is None:
            question = "Does every rank return two numbers, the loss and the accuracy?"
            raise Wrong(f"rank {rank} returns {one['returned']!r}", "a pair", question)
    _check_rows(pairs, wanted, wrong)
    _check_same_rate(seen)
    _check_pairs(pairs, wanted, wrong, held_out)
    if not _is_near(seen[0]["loss"], [wanted[0]]):
        question = "Which number decides whether the rate is lowered?"
        raise Wrong(f"plateau.step({seen[0]['loss']:.4f})", f"{wanted[0]:.4f}", question)
    if any(one["moved"] for one in seen):
        raise Wrong("other weights than before", "the same", "Does validation train?")
    judged = [one["judged"] for one in seen]
    if sum(judged) != held_out:
        said = f"{judged} images judged on ranks {' and '.join(map(str, range(ranks)))}"
        question = "Is an image judged more than once, or by no rank?"
        raise Wrong(said, f"{held_out} on all together", question)


def _a_case(count, ranks):
    """Arguments of `_run_as_rank`, the right (loss, accuracy), and what mistakes would give.

    Of the held-out images the guess is right less and less often; the first weighs much. So each
    mistake gives another loss: that of some ranks or batches, a mean of means, an image twice.
    """
    while True:
        given = {"inputs": torch.randn(count + 53, 5), "weights": torch.randn(4, 5)}
        training, held_out = torch.randperm(count + 53)[: count + 40].split([40, count])
        best = (given["inputs"] @ given["weights"].T).argmax(1)
        labels = torch.randint(4, (count + 53,))
        is_right = torch.rand(count) > torch.linspace(0.1, 0.9, count)
        labels[held_out] = torch.where(is_right, best[held_out], (best[held_out] + 1) % 4)
        labels[held_out[0]] = (best[held_out[0]] + 1) % 4
        given["inputs"][held_out[0]] *= count / 4
        given.update(labels=labels, training=training, held_out=held_out)

        def score(rows, given=given):
            scores, labels = given["inputs"][rows] @ given["weights"].T, given["labels"][rows]
            right = (scores.argmax(1) == labels).float().mean()
            return np.array([F.cross_entropy(scores, labels).item(), right.item()])

        shares = [held_out[rank::ranks] for rank in range(ranks)]
        own = [score(share) for share in shares]
        wrong = {
            "training": [score(training), *(score(training[r::ranks]) for r in range(ranks))],
            "mean": [sum(own) / ranks],
            "twice": [score(torch.cat([held_out, held_out[:1]]))],
            "local": own,
            "batch": [score(held_out[:100]), score(held_out[-(count % 100) :])],
        }
        wrong["mean" if count > 100 else "batch"] = []  # shares are equal, or one batch is all
        wanted = score(held_out)
        losses = [wanted[0], *(each[0] for group in wrong.values() for each in group)]
        nearest = min(abs(one - other) for one, other in itertools.combinations(losses, 2))
        if nearest > 0.02 and 0 < wanted[1] < 1:
            return given, wanted, wrong


class _Counting(torch.nn.Linear):
    """A layer that counts the images that it judges, in a batch or one by one."""

    judged = 0

    def forward(self, images):
        scores = super().forward(images)
        self.judged += scores.numel() // self.out_features
        return scores


def _run_as_rank(answer, inputs, labels, weights, training, held_out):
    """Call the answer on this rank; returns what was seen on all ranks."""
    device = ddp.device()
    model = _Counting(5, 4, bias=False).to(device)
    with torch.no_grad():
        model.weight.copy_(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    given = (inputs.to(device), labels.to(device), training, held_out, plateau)
    returned = answer(model, *given)
    if isinstance(returned, dict):  # by name, or in its order
        by_name = {key: each for key in returned for each in ("loss", "acc") if each in str(key)}
        returned = [
            returned[key] for key in sorted(returned, key=lambda key: by_name.get(key) == "acc")
        ]
    if isinstance(returned, (list, tuple)):
        returned = [each.item() if hasattr(each, "item") else each for each in returned]
    elif isinstance(returned, torch.Tensor):
        returned = returned.tolist()
    moved = not torch.equal(model.weight.cpu(), weights)
    mine = {"returned": returned, "steps": plateau.last_epoch, "moved": moved}
    mine["judged"] = model.judged
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, {**mine, "loss": float(plateau.best)})
    return everyones


def _pair(returned):
    """(loss, accuracy) as an array; None if it is anything else."""
    try:
        values = np.asarray(returned, dtype=float)
    except (TypeError, ValueError):
        return None
    return values if values.shape == (2,) and not np.isnan(values).any() else None


def _check_rows(pairs, wanted, wrong):
    for pair in pairs:
        if _is_near(pair[0], [each[0] for each in wrong["training"]]):
            raise Wrong(*_shown(pairs, wanted), "Which images does your loop see?")


def _check_same_rate(seen):
    """`plateau.step` was called once, on every rank with the same number."""
    steps, losses = [one["steps"] for one in seen], [one["loss"] for one in seen]
    if set(steps) != {1}:
        said = f"plateau.step was called {steps} times, by rank"
        raise Wrong(said, "once on each", "When may the rate be lowered?")
    if not math.isclose(min(losses), max(losses), rel_tol=1e-4):
        said = ", ".join(f"plateau.step({loss:.4f}) on rank {n}" for n, loss in enumerate(losses))
        raise Wrong(said, "the same loss", "What is the rate of each rank after some epochs?")


def _check_pairs(pairs, wanted, wrong, count):
    if all(np.allclose(pair, wanted, atol=0.005) for pair in pairs):
        return
    question = "Is it the mean over all held-out images?"
    if any(_is_near(pair[0], [each[0] for each in wrong["local"]]) for pair in pairs):
        question = "Whose images does each rank's number speak of?"
    elif _is_near(pairs[0][0], [each[0] for each in wrong["mean"]]):
        question = f"{len(pairs)} ranks share {count} images. What does each image weigh?"
    elif _is_near(pairs[0][0], [each[0] for each in wrong["batch"]]):
        question = f"Of the {count} images a rank has several batches. Which of them count?"
    elif _is_near(pairs[0][0], [wrong["twice"][0][0]]):
        question = "Is there an image that counts twice?"
    raise Wrong(*_shown(pairs, wanted), question)


def _is_near(value, values):
    return any(abs(value - each) < 0.005 for each in values)


def _shown(pairs, wanted):
    """The ranks' pairs, and the right one, in words."""
    yours = ", ".join(f"rank {rank} {np.round(pair, 4)}" for rank, pair in enumerate(pairs))
    return yours, f"{np.round(wanted, 4)} on each"
