"""Answers to exercise A of `gpt`: how many buckets DDP makes."""

import math

import numpy as np
import torch


def with_a_list(sizes, bucket_cap_mb):
    buckets = [[]]
    for size in sizes[::-1]:
        buckets[-1].append(size)
        if sum(buckets[-1]) >= bucket_cap_mb * 1024 * 1024:
            buckets.append([])
    return len([bucket for bucket in buckets if bucket])


def that_pops(sizes, bucket_cap_mb):
    buckets = 0
    while sizes:
        room = bucket_cap_mb * 2**20
        while sizes and room > 0:
            room -= sizes.pop()
        buckets += 1
    return buckets


def with_numpy(sizes, bucket_cap_mb):
    filled = np.float64(0)
    count = np.int64(0)
    for size in np.array(sizes)[::-1]:
        filled += size / 2**20
        if filled >= bucket_cap_mb:
            count, filled = count + 1, 0
    return count + int(filled > 0)


def by_recursion(sizes, bucket_cap_mb):
    if not sizes:
        return 0
    filled, left = 0, list(sizes)
    while left and filled < bucket_cap_mb * 2**20:
        filled += left.pop()
    return 1 + by_recursion(left, bucket_cap_mb)


def greedy(sizes, limit, *, last=True, strict=False):
    count, filled = 0, 0
    for size in sizes:
        filled += size
        if filled > limit or (filled == limit and not strict):
            count, filled = count + 1, 0
    return count + (last and filled > 0)


def with_a_rest(rest):
    """Buckets of which the next one does not begin empty."""

    def answer(sizes, cap):
        count, filled = 0, 0
        for size in reversed(sizes):
            filled += size
            if filled >= cap * 2**20:
                count, filled = count + 1, rest(filled, size, cap * 2**20)
        return count + (filled > 0)

    return answer


def closed_before(sizes, cap):
    count, filled = 1, 0
    for size in reversed(sizes):
        if filled and filled + size > cap * 2**20:
            count, filled = count + 1, 0
        filled += size
    return count


def first_at_a_mib(sizes, cap):
    """With a first bucket that is full at 1 MiB, as it is without `bucket_cap_mb`."""
    count, filled = 0, 0
    for size in reversed(sizes):
        filled += size
        if filled >= (1 if count == 0 else cap) * 2**20:
            count, filled = count + 1, 0
    return count + (filled > 0)


RIGHT = {
    "a list": with_a_list,
    "it empties its list": that_pops,
    "numpy": with_numpy,
    "a tensor": lambda *given: torch.tensor(with_a_list(*given)),
    "by recursion": by_recursion,
    "a float": lambda *given: float(with_a_list(*given)),
}
WRONG = {
    "a text": (lambda sizes, cap: "13", "What does your function return"),
    "a list of sizes": (lambda sizes, cap: [1, 2, 3], "What does your function return"),
    "true": (lambda sizes, cap: True, "What does your function return"),
    "no number": (lambda sizes, cap: math.nan, "What does your function return"),
    "divided": (lambda n, cap: math.ceil(sum(n) / cap / 2**20), "middle of a parameter"),
    "rounded": (
        lambda n, cap: round(sum(n) / cap / 2**20),
        "middle of a parameter|close a bucket",
    ),
    "from the front": (lambda sizes, cap: greedy(sizes, cap * 2**20), "ready first"),
    "no last one": (lambda n, cap: greedy(n[::-1], cap * 2**20, last=False), "last full bucket"),
    "one more": (lambda n, cap: greedy(n[::-1], cap * 2**20, last=False) + 1, "is left"),
    "the rest goes on": (with_a_rest(lambda filled, size, limit: filled - limit), "just begun"),
    "the last one again": (with_a_rest(lambda filled, size, limit: size), "just begun"),
    "closed before": (closed_before, "before it would be too large"),
    "a MB": (lambda n, cap: greedy(n[::-1], cap * 10**6), "How many bytes has a MiB"),
    "strictly more": (lambda n, cap: greedy(n[::-1], cap * 2**20, strict=True), "full exactly"),
    "a table": (lambda n, cap: {1: 13, 2: 7, 5: 3, 25: 1}[cap], "buckets of parameters"),
    "one for each": (lambda sizes, cap: len(sizes), "close a bucket"),
    "the largest first": (lambda n, cap: greedy(sorted(n)[::-1], cap * 2**20), "close a bucket"),
    "the first at 1 MiB": (first_at_a_mib, "close a bucket"),
    "KiB": (lambda n, cap: greedy(n[::-1], cap * 2**10), "close a bucket"),
    "elements": (lambda n, cap: greedy([s / 4 for s in n[::-1]], cap * 2**20), "close a bucket"),
}
EQUIVALENT = {
    "line 4: 0 → 1 (2)": "sizes are multiples of 4 bytes: one more fills no bucket",
    "line 9: 0 → 1": "sizes are multiples of 4 bytes",
}
IN_TESTS = ["it empties its list", "a table", "strictly more"]
