"""Parts of a data set: for training, for choosing, and for the one honest look at the end."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ddp_common.errors import Error

ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1


def split(
    length: int, fractions: Sequence[float], *, by: ArrayLike | None = None, seed: int = 0
) -> list[np.ndarray]:
    """Split `range(length)` at random into disjoint parts, the same on every rank.

    `fractions` are the shares of all parts but the first, which gets the rest: `split(100, [0.1])`
    returns (90 indices, 10 indices). With `by`, classes (int or str) of shape (length,), every
    part has every class in its proportion, at least one sample of each. It keeps no group whole.

    Returns a list of sorted int64 arrays. Raises `Error` unless the shares are positive and leave
    something for the first part; if a part would be empty; if a class is too small.
    """
    are_several = isinstance(fractions, Sequence | np.ndarray) and len(fractions) > 0
    are_positive = are_several and all(share > 0 for share in fractions)
    if not are_positive or not sum(fractions) < 1 - ROUNDING:  # so written, NaN is refused too
        raise Error(
            "split takes a list of positive fractions that sum to less than 1, one for each part "
            f"but the first, not {fractions}."
        )
    if by is not None:
        return _split_each_class(length, fractions, np.asarray(by), seed)
    order = np.random.default_rng(seed).permutation(length)
    first = 1 - sum(fractions)
    bounds = np.round(length * np.cumsum([first, *fractions])[:-1]).astype(int)
    parts = [np.sort(part) for part in np.split(order, bounds)]
    sizes = [len(part) for part in parts]
    if not all(sizes):
        raise Error(
            f"split of {length} samples by {fractions}: the parts would have {sizes}, and none "
            "may be empty. The fractions are those of all parts but the first."
        )
    return parts


def _split_each_class(
    length: int, fractions: Sequence[float], classes: np.ndarray, seed: int
) -> list[np.ndarray]:
    if classes.shape != (length,):
        raise Error(
            f"split(…, by=): the classes of {length} samples have the shape ({length},), not "
            f"{classes.shape}."
        )
    parts: list[list[np.ndarray]] = [[] for _ in range(len(fractions) + 1)]
    for number, label in enumerate(np.unique(classes)):
        members = np.flatnonzero(classes == label)
        stream = label if classes.dtype.kind in "iu" else number
        members = np.random.default_rng([seed, stream]).permutation(members)
        counts = [max(1, math.floor(len(members) * share + ROUNDING)) for share in fractions]
        if sum(counts) >= len(members):
            raise Error(
                f"Class {label} has only {len(members)} samples, too few for {len(parts)} parts "
                "in which it must not be missing. Add samples, or leave the class out."
            )
        bounds = np.cumsum([len(members) - sum(counts), *counts])[:-1]
        for part, chosen in zip(parts, np.split(members, bounds)):
            part.append(chosen)
    return [np.sort(np.concatenate(part)) for part in parts]
