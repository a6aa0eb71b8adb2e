"""Parts of a data set: for training, for choosing, and for the one honest look at the end."""

import math
from collections.abc import Sequence

import numpy as np

from ddp_common.errors import Error

ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1


def split(length: int, fractions: Sequence[float], *, seed: int = 0) -> list[np.ndarray]:
    """Split `range(length)` at random into disjoint parts, the same on every rank.

    `fractions` are the shares of all parts but the first, which gets the rest: `split(100, [0.1])`
    returns (90 indices, 10 indices). Returns a list of sorted int64 arrays. Raises `Error` unless
    the shares are positive and leave something for the first part, and if a part would be empty.
    """
    _check_fractions(fractions)
    order = np.random.default_rng(seed).permutation(length)
    first = 1 - sum(fractions)
    bounds = np.round(length * np.cumsum([first, *fractions])[:-1]).astype(int)
    parts = [np.sort(part) for part in np.split(order, bounds)]
    if any(len(part) == 0 for part in parts):
        sizes = ", ".join(str(len(part)) for part in parts)
        raise Error(
            f"split of {length} samples by {fractions}: the parts would have {sizes}, and none "
            "may be empty. The fractions are those of all parts but the first."
        )
    return parts


def _check_fractions(fractions):
    are_several = isinstance(fractions, Sequence | np.ndarray) and len(fractions) > 0
    are_positive = are_several and all(share > 0 for share in fractions)
    if not are_positive or not sum(fractions) < 1 - ROUNDING:  # so written, NaN is refused too
        raise Error(
            "split takes a list of positive fractions that sum to less than 1, one for each part "
            f"but the first, not {fractions}."
        )


def stratified_split(
    targets: Sequence[int], fractions: Sequence[float], *, seed: int = 0
) -> list[np.ndarray]:
    """Split the samples at random into disjoint parts, each with every class in its proportion.

    `targets` is the class (int) of each sample; `fractions` are those of `split`. A class has at
    least one sample in each part. The parts are the same on every rank. Returns a list of sorted
    int64 arrays. Raises `Error` for fractions that `split` refuses, and for a class that is too
    small.
    """
    _check_fractions(fractions)
    classes = np.asarray(targets)
    parts: list[list[np.ndarray]] = [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(classes):
        members = np.flatnonzero(classes == label)
        members = np.random.default_rng([seed, label]).permutation(members)
        counts = [max(1, math.floor(len(members) * share + 1e-9)) for share in fractions]
        if sum(counts) >= len(members):
            raise Error(
                f"Class {label} has only {len(members)} samples, too few for {len(parts)} parts "
                "in which it must not be missing. Add samples, or leave the class out."
            )
        rest = len(members) - sum(counts)
        bounds = np.cumsum([rest, *counts])[:-1]
        for part, chosen in zip(parts, np.split(members, bounds)):
            part.append(chosen)
    return [np.sort(np.concatenate(part)) for part in parts]
