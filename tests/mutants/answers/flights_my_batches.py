"""Answers to exercise A of `flights`: batches from rows that lie apart."""

import os
from random import Random

import numpy as np
import pandas as pd
import torch


def in_order(order, begin=np.random.Generator.random, batch_type=np.array):
    """Batches in which the rows of a partition come as `order(rows, random)` has them."""

    def deal(lengths, batch_size, seed):
        random = np.random.default_rng(seed)
        place = [(np.arange(rows) + begin(random)) / max(rows, 1) for rows in lengths]
        pairs = [(n, row) for n, rows in enumerate(lengths) for row in order(rows, random)]
        dealt = [pairs[n] for n in np.argsort(np.concatenate(place), kind="stable")]
        starts = range(0, len(dealt), batch_size)
        return [batch_type(dealt[start : start + batch_size]) for start in starts]

    return deal


def permuted(rows, random):
    return random.permutation(rows)


def halves(rows, random):
    half = rows // 2
    return [*random.permutation(half), *half + random.permutation(rows - half)]


def even_numbers_first(rows, random):
    return [*random.permutation(np.arange(0, rows, 2)), *random.permutation(np.arange(1, rows, 2))]


def from_one_state(lengths, batch_size, seed):
    """Partitions of one length get one permutation."""
    return in_order(lambda rows, _: np.random.default_rng(seed).permutation(rows))(
        lengths, batch_size, seed
    )


def from_one_list(lengths, batch_size, seed):
    """All rows have keys by their number; each partition sorts its first ones."""
    keys = np.random.default_rng(seed).random(max(lengths))
    return in_order(lambda rows, _: np.argsort(keys[:rows]))(lengths, batch_size, seed)


def batch_by_batch(lengths, batch_size, seed):
    """Without places: each batch takes the next rows of each partition, in proportion."""
    random = np.random.default_rng(seed)
    rows = [random.permutation(length) for length in lengths]
    total, pairs, before = sum(lengths), [], [0] * len(lengths)
    for end in [*range(batch_size, total, batch_size), total]:
        until = [round(end * length / total) for length in lengths]
        for n, (start, stop) in enumerate(zip(before, until)):
            pairs += [(n, row) for row in rows[n][start:stop]]
        before = until
    return [np.array(pairs[k : k + batch_size]) for k in range(0, total, batch_size)]


def sorted_by_place(lengths, batch_size, seed):
    """Tuples that sort themselves, from the random module."""
    random = Random(seed)
    rows = []
    for n, length in enumerate(lengths):
        order = list(range(length))
        random.shuffle(order)
        begin = random.random()
        rows += [((k + begin) / length, n, row) for k, row in enumerate(order)]
    rows = [pair for _, *pair in sorted(rows)]
    return [rows[k : k + batch_size] for k in range(0, len(rows), batch_size)]


TOLD = in_order(permuted)


def split_arrays(lengths, batch_size, seed):
    """Batches as a generator of tensors, from arrays that were cut by numpy."""
    whole = np.concatenate(TOLD(lengths, batch_size, seed))
    for batch in np.split(whole, range(batch_size, len(whole), batch_size)):
        yield torch.tensor(batch)


def as_frames(lengths, batch_size, seed):
    """Each batch a DataFrame, its rows shuffled once more."""
    random = np.random.default_rng(seed)
    names = ["partition", "row"]
    batches = TOLD(lengths, batch_size, seed)
    return [pd.DataFrame(random.permutation(batch), columns=names) for batch in batches]


def with_text_as_seed(lengths, batch_size, seed):
    """`Random` of a text is the same in every process: it is no hash."""
    return TOLD(lengths, batch_size, Random(f"batches {seed}").randrange(2**32))


def row_and_partition(lengths, batch_size, seed):
    return [batch[:, ::-1] for batch in TOLD(lengths, batch_size, seed)]


def rows_alone(lengths, batch_size, seed):
    return [batch[:, 1] for batch in TOLD(lengths, batch_size, seed)]


def one_too_many(lengths, batch_size, seed):
    """Cut as often as batches fit, and once more: that one may be empty."""
    batches = TOLD(lengths, batch_size, seed)
    return batches + [batches[0][:0]] if len(batches[-1]) == batch_size else batches


def in_equal_parts(lengths, batch_size, seed):
    """As many batches as it takes, all of about one size."""
    batches = TOLD(lengths, batch_size, seed)
    return np.array_split(np.concatenate(batches), len(batches))


def drawn_with_replacement(rows, random):
    return random.integers(0, max(rows, 1), rows)


def one_permutation(lengths, batch_size, seed):
    dealt = np.random.default_rng(seed).permutation(np.concatenate(TOLD(lengths, batch_size, 0)))
    return [dealt[start : start + batch_size] for start in range(0, len(dealt), batch_size)]


def one_after_the_other(lengths, batch_size, seed):
    whole = np.concatenate(TOLD(lengths, batch_size, seed))
    whole = whole[np.argsort(whole[:, 0], kind="stable")]
    return [whole[start : start + batch_size] for start in range(0, len(whole), batch_size)]


def equal_shares(lengths, batch_size, seed):
    """Partitions take turns, until they are empty."""
    random = np.random.default_rng(seed)
    rows = [
        (k, n, row) for n, m in enumerate(lengths) for k, row in enumerate(random.permutation(m))
    ]
    rows = [pair for _, *pair in sorted(rows)]
    return [rows[k : k + batch_size] for k in range(0, len(rows), batch_size)]


def seeded(seed_of):
    return lambda lengths, size, seed: TOLD(lengths, size, seed_of(seed))


COUNT = [0]


def of_the_call(seed):
    COUNT[0] += 1
    return seed + COUNT[0]


RIGHT = {
    "as told": TOLD,
    "from the middle": in_order(permuted, begin=lambda random: 0.5, batch_type=tuple),
    "floats": in_order(permuted, batch_type=lambda rows: np.array(rows, "float32")),
    "sorted keys": in_order(lambda rows, random: np.argsort(random.random(rows))),
    "batch by batch": batch_by_batch,
    "sorted by place": sorted_by_place,
    "a generator of tensors": split_arrays,
    "tables": as_frames,
    "a text as a seed": with_text_as_seed,
}
WRONG = {
    "reversed": (in_order(lambda rows, _: range(rows)[::-1]), "What shuffles"),
    "in their order": (in_order(lambda rows, _: range(rows)), "What shuffles"),
    "every seventh": (in_order(lambda rows, _: np.argsort(np.arange(rows) % 7)), "What shuffles"),
    "rolled": (
        in_order(lambda rows, random: np.roll(range(rows), random.integers(60))),
        "What shuffles",
    ),
    "halves": (in_order(halves), "Can each of them come at each place"),
    "even numbers first": (in_order(even_numbers_first), "Can each of them come at each place"),
    "one state": (from_one_state, "the next permutation drawn"),
    "one list": (from_one_list, "the next permutation drawn"),
    "no seed": (in_order(lambda n, _: np.random.default_rng(0).permutation(n)), "`seed` used"),
    "the seed 0": (seeded(lambda seed: 0), "`seed` used"),
    "another each time": (seeded(lambda seed: None), "Do they agree"),
    "the seed and the calls": (seeded(of_the_call), "Do they agree"),
    "the parity of the seed": (seeded(lambda seed: seed % 2), "`seed` used"),
    "the pid": (seeded(lambda seed: seed + os.getpid()), "Do they agree"),
    "a hash of text": (seeded(lambda seed: hash(str(seed)) % 2**32), "Do they agree"),
    "no last batch": (lambda *given: TOLD(*given)[:-1], "the last batch get"),
    "no first batch": (lambda *given: TOLD(*given)[1:], "the last batch get"),
    "a row too many": (lambda n, size, seed: TOLD(n, size + 1, seed), "do you cut"),
    "a row too few": (lambda n, size, seed: TOLD(n, size - 1, seed), "do you cut"),
    "an empty one": (one_too_many, "do you cut"),
    "equal parts": (in_equal_parts, "do you cut"),
    "with replacement": (in_order(drawn_with_replacement), "more than once"),
    "row and partition": (row_and_partition, "rows and partitions begin to count"),
    "rows alone": (rows_alone, "Which two numbers name a row"),
    "one permutation of all": (one_permutation, "the middle row of each partition"),
    "one after the other": (one_after_the_other, "the middle row of each partition"),
    "in turns": (equal_shares, "the middle row of each partition"),
    "a number": (lambda *_: 7, "What do you return"),
}
EQUIVALENT = {
    "line 11: np.argsort(place, kind='stable') → np.argsort(place)": "equal places have no order",
    "line 11: 'stable' → None": "equal places have no order",
}
IN_TESTS = ["a text as a seed", "the pid", "halves"]
