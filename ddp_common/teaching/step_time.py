"""A simple model of the time of a training step, fitted to steps that were measured.

    seconds = compute / n  +  2 (n - 1) / n * bytes / bandwidth  +  latency * buckets

`n` is the number of ranks, which share a global batch. *Compute* is what one rank alone would
need for the batch. *Transfer* is the time to send the gradients once around a ring of ranks: each
rank sends and receives 2 (n - 1) / n times their bytes. *Latency* is what every bucket costs,
whatever its size; one rank sends nothing and pays none.

The model has no term for computing that is not shared out. Such computing, repeated by every rank,
has exactly the shape of transfer, (n - 1) / n, so it is counted there: what the model says of
other numbers of ranks stays right, its name for the term does not. Whoever can measure ranks that
do not average tells the two apart, by `work`. It has no term either for ranks that disturb each
other on one machine, and for sending while computing goes on: beyond what was measured it is a
rough guess. Relies on NumPy only. Promises: no term is negative, and what the measurements cannot
tell apart is said, not guessed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TERMS = ("compute", "transfer", "latency")
ENOUGH = 3  # numbers of ranks, one of them 1, that tell all terms apart
DISTINCT = 1e-6  # what differs by less, relatively, is the same


@dataclass(frozen=True)
class StepTime:
    """A fitted model.

    `compute`, `transfer` and `latency` are seconds for one unit of work, of size and of messages,
    as they were given to `fit`. `unknown` names the terms that the measurements do not tell apart;
    `corners` are then the extreme ways of sharing out what was measured among them, as rates of
    the three terms. `miss` is the largest relative difference between a measured step and the
    model.
    """

    compute: float
    transfer: float
    latency: float
    unknown: tuple[str, ...]
    corners: tuple[tuple[float, ...], ...]
    miss: float

    def terms(
        self, ranks: int, work: float = 1, size: float = 1, messages: float = 1
    ) -> dict[str, float]:
        """The seconds of each term, by its name."""
        row = _row(ranks, work, size, messages)
        rates = (self.compute, self.transfer, self.latency)
        return {term: float(rate * unit) for term, rate, unit in zip(TERMS, rates, row)}

    def seconds(self, ranks: int, work: float = 1, size: float = 1, messages: float = 1) -> float:
        """The time of a step."""
        return sum(self.terms(ranks, work, size, messages).values())

    def span(
        self, ranks: int, work: float = 1, size: float = 1, messages: float = 1
    ) -> tuple[float, float]:
        """The least and the most that a step may take if all `corners` are as good.

        Both are `seconds`, but for rounding, where every term is known.
        """
        row = _row(ranks, work, size, messages)
        times = [float(np.dot(rates, row)) for rates in self.corners]
        return min(times), max(times)

    def dominant(self, ranks: int, work: float = 1, size: float = 1, messages: float = 1) -> str:
        """The term that takes most of a step; terms that are not told apart count as one.

        These are then joined by a plus: 'transfer + latency'.
        """
        seconds = self.terms(ranks, work, size, messages)
        together = " + ".join(self.unknown)
        parts = {term: value for term, value in seconds.items() if term not in self.unknown}
        if together:
            parts[together] = sum(seconds[term] for term in self.unknown)
        return max(parts, key=lambda name: parts[name])


def fit(
    ranks: Sequence[int],
    seconds: Sequence[float],
    *,
    work: Sequence[float] | None = None,
    size: Sequence[float] | None = None,
    messages: Sequence[float] | None = None,
) -> StepTime:
    """The model that misses the measured steps least, relatively, with no negative term.

    One entry for each measurement: the number of ranks, the seconds of a step, and what is known
    of it. `work` is how much there is to compute (samples in the global batch), `size` how much
    to send (bytes of all gradients), `messages` in how many pieces (buckets). What is not given
    counts as 1: then the terms are the seconds of such a step.

    Raises ValueError where there is nothing to fit: no step on several ranks, other numbers of
    entries, a step that took no time.
    """
    count = len(ranks)
    columns = [ranks] + [
        np.ones(count) if given is None else given for given in (work, size, messages)
    ]
    if count == 0 or any(len(column) != count for column in [*columns, seconds]):
        raise ValueError("fit needs one entry for each measured step, and at least one step")
    measured = np.asarray(seconds, dtype=float)
    if not (np.isfinite(measured).all() and measured.min() > 0 and min(ranks) >= 1):
        raise ValueError("fit needs steps that took some time, on 1 rank or more")

    design = np.array([_row(*entry) for entry in zip(*columns)]) / measured[:, None]
    if not design.any(axis=0).all():
        raise ValueError("fit needs steps on several ranks: on one rank nothing is exchanged")
    scale = np.linalg.norm(design, axis=0)
    corners = [rates / scale for rates in _best_without_negatives(design / scale)]
    rates = np.mean(corners, axis=0)
    compute, transfer, latency = (float(rate) for rate in rates)
    return StepTime(
        compute,
        transfer,
        latency,
        unknown=_not_told_apart(design / scale),
        corners=tuple(tuple(map(float, corner)) for corner in corners),
        miss=float(np.abs(design @ rates - 1).max()),
    )


def _row(ranks, work, size, messages):
    """What each rate is multiplied by."""
    return work / ranks, 2 * (ranks - 1) / ranks * size, messages * (ranks > 1)


def _best_without_negatives(design):
    """The rates, none negative, whose products with `design` are nearest to 1: a list.

    Where several are equally near, these are the corners between which all others lie. Each
    corner has as few terms as can be, so it is enough to try every choice of terms.
    """
    found = []  # (how far off, rates)
    terms = range(design.shape[1])
    for count in range(1, len(terms) + 1):
        for chosen in map(list, itertools.combinations(terms, count)):
            if np.linalg.matrix_rank(design[:, chosen], tol=DISTINCT) < count:
                continue
            rates = np.zeros(len(terms))
            rates[chosen] = np.linalg.lstsq(design[:, chosen], np.ones(len(design)))[0]
            if rates.min() >= 0:
                found.append((np.linalg.norm(design @ rates - 1), rates))
    least = min(off for off, _ in found)
    return [rates for off, rates in found if off <= least * (1 + 1e-9) + 1e-9]


def _not_told_apart(design):
    """The terms that can be exchanged for each other without changing any measured step."""
    _, strengths, directions = np.linalg.svd(design)
    seen = directions[: int((strengths > DISTINCT * strengths[0]).sum())]
    known = (seen**2).sum(axis=0)  # 1 where no exchange moves the term
    return tuple(term for term, share in zip(TERMS, known) if share < 1 - DISTINCT)


def in_words(model: StepTime, ranks: Sequence[int], beyond: int, **of_a_step: float) -> str:
    """What the model says of the steps that were measured on `ranks`, and of those `beyond`.

    `of_a_step` is what `seconds` takes: work, size and messages of the step in question.
    """
    first = min(ranks)
    alone = model.seconds(first, **of_a_step)
    terms = model.terms(max(ranks), **of_a_step)
    sentences = [
        f"A model of the step: on {max(ranks)} ranks, in ms, {_parts_in_words(model, terms)}."
    ]
    if model.unknown:
        sentences.append(
            f"How much of that is {' and how much '.join(model.unknown)} cannot be told from "
            f"{len(set(ranks))} numbers of ranks{_what_would_tell(ranks)}."
        )
    least, most = model.span(beyond, **of_a_step)
    times = f"{1_000 * most:.1f} ms"
    gain = f"{alone / most:.2f}"
    if most > 1.01 * least:
        times = f"{1_000 * least:.1f} to {times}"
        gain = f"{gain} to {alone / least:.2f}"
    sentences.append(f"It misses the measured steps by up to {model.miss:.0%}.")
    missed = model.miss * sum(terms.values())
    small = [term for term in TERMS if term not in model.unknown and terms[term] < missed]
    if small:
        sentences.append(
            f"That is more than all of {' or '.join(small)}: how large "
            f"{'that term is' if len(small) == 1 else 'these terms are'} is not known."
        )
    sentences += [
        f"On {beyond} ranks that each have a core or GPU of their own, it says {times}: {gain} "
        f"times as fast as {first}; most of that step is {model.dominant(beyond, **of_a_step)}.",
    ]
    return " ".join(sentences)


def _what_would_tell(ranks):
    """Which measurement would tell the terms apart."""
    if len(set(ranks)) < ENOUGH:
        return f": measure {ENOUGH}"
    if min(ranks) > 1:
        return ": measure one rank, too"
    return ""


def _parts_in_words(model, seconds):
    known = [f"{term} {1_000 * seconds[term]:.1f}" for term in TERMS if term not in model.unknown]
    if model.unknown:
        together = 1_000 * sum(seconds[term] for term in model.unknown)
        known.append(f"{' and '.join(model.unknown)} together {together:.1f}")
    return ", ".join(known)
