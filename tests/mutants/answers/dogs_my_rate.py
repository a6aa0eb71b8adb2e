"""Answers to exercise A of `dogs`: a rate for many ranks."""

import numpy as np
import torch


def a_rate(seen, base, ranks, rule, warm_up):
    end = base * ranks ** {"kept": 0, "square root": 0.5, "linear": 1}[rule]
    return float(np.interp(seen, [0, warm_up], [base, end])) if warm_up else end


def written(form):
    return lambda *given: form(a_rate(*given))


def as_cases(seen, base, ranks, rule, warm_up):
    if rule == "kept":
        return base
    end = base * ranks if rule == "linear" else base * ranks**0.5
    if seen >= warm_up:
        return end
    return base + (end - base) * seen / warm_up


def by_a_weighted_mean(seen, base, ranks, rule, warm_up):
    end = a_rate(1, base, ranks, rule, 0)
    share = 1 if warm_up == 0 else min(1.0, seen / warm_up)
    return (1 - share) * base + share * end


def wrong(change):
    """The rate of an answer that is wrong in one thing: `change(seen, …)` is what it sees."""
    return lambda *given: a_rate(*change(*given))


def from_0(seen, base, ranks, rule, warm_up):
    return a_rate(seen, base, ranks, rule, warm_up) * (min(1, seen / warm_up) if warm_up else 1)


def goes_on_growing(seen, base, ranks, rule, warm_up):
    end = a_rate(1, base, ranks, rule, 0)
    return base + (end - base) * seen / warm_up if warm_up else end


def squared(seen, base, ranks, rule, warm_up):
    return a_rate(seen**2 / max(1, warm_up), base, ranks, rule, warm_up)


def in_three_stairs(seen, base, ranks, rule, warm_up):
    third = max(1, warm_up // 3)
    return a_rate(seen // third * third, base, ranks, rule, warm_up)


def geometric(seen, base, ranks, rule, warm_up):
    end = a_rate(1, base, ranks, rule, 0)
    return base * (end / base) ** (min(1, seen / warm_up) if warm_up else 1)


def half_way(seen, base, ranks, rule, warm_up):
    """Right at a third, as a sine that starts and ends there."""
    third = warm_up // 3
    off = 0.3 * base * ranks if third < seen < warm_up else 0
    return a_rate(seen, base, ranks, rule, warm_up) + off


RIGHT = {
    "as told": a_rate,
    "float32": written(np.float32),
    "rounded": written(lambda rate: float(f"{rate:.3g}")),
    "a list": written(lambda rate: [rate]),
    "a tensor": written(torch.tensor),
    "an array": written(np.array),
    "as cases": as_cases,
    "by a weighted mean": by_a_weighted_mean,
}
ROOT = {"square root": "linear"}
WRONG = {
    "from 0": (from_0, "With which rate does training start"),
    "at once": (wrong(lambda s, b, k, r, w: (s, b, k, r, 0)), "With which rate does training"),
    "goes on growing": (goes_on_growing, "long after the warm-up"),
    "linear for the root": (
        wrong(lambda s, b, k, r, w: (s, b, k, ROOT.get(r, r), w)),
        "what is the rule 'square root'",
    ),
    "a root for linear": (
        wrong(lambda s, b, k, r, w: (s, b, k**0.5 if r == "linear" else k, r, w)),
        "what is the rule 'linear'",
    ),
    "the rules fall": (wrong(lambda s, b, k, r, w: (s, b, 1 / k, r, w)), "what is the rule"),
    "twice as fast": (wrong(lambda s, b, k, r, w: (2 * s, b, k, r, w)), "Which share of the way"),
    "by rank": (wrong(lambda s, b, k, r, w: (s * k, b, k, r, w)), "Which share of the way"),
    "squared": (squared, "Which share of the way"),
    "in three stairs": (in_three_stairs, "Which share of the way"),
    "geometric": (geometric, "Which share of the way"),
    "right at a third": (half_way, "Which share of the way"),
    "never warm": (wrong(lambda s, b, k, r, w: (0, b, k, r, max(1, w))), "what is the rule"),
    "nothing": (written(lambda rate: None), "what is the rule 'kept'"),
    "text": (written(lambda rate: "fast"), "what is the rule 'kept'"),
}
EQUIVALENT: dict = {}
IN_TESTS = ["as cases", "in three stairs", "right at a third"]
