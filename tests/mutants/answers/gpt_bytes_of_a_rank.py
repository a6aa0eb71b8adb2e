"""Answers to exercise C of `gpt`: the bytes of a rank."""

import numpy as np
import torch


def by_kind(parameters, ranks, way):
    kinds = {"parameter": 4, "gradient": 4, "mean": 4, "mean of squares": 4}
    if way == "DDP":
        kinds["bucket"] = 4
    return sum(kinds.values()) * parameters // (ranks if "FSDP" in way else 1)


FOUR = "four kinds"
HELD = "each rank hold"
RIGHT = {
    "by kind": by_kind,
    "with Adam's counts": lambda n, ranks, way: by_kind(n, ranks, way) + 40,
    "a table": lambda n, ranks, way: n * {"DDP": 20, "DDP view": 16, "FSDP2": 16 / ranks}[way],
    "a tensor": lambda *given: torch.tensor(float(by_kind(*given))),
    "numpy": lambda *given: np.float32(by_kind(*given)),
    "one formula": lambda n, k, way: 4 * n * (4 + (way == "DDP")) / (k if way[0] == "F" else 1),
}


def of_fsdp(other):
    return lambda n, ranks, way: other(n, ranks) if way == "FSDP2" else by_kind(n, 1, way)


WRONG = {
    "nothing": (lambda n, ranks, way: None, "nothing is written yet"),
    "a text": (lambda n, ranks, way: f"{20 * n}", "What does your function return"),
    "no buckets": (lambda n, ranks, way: 16 * n, FOUR),
    "no optimizer": (lambda n, ranks, way: 4 * n, FOUR),
    "one mean": (lambda n, ranks, way: by_kind(n, ranks, way) * 3 // 4, FOUR),
    "MiB": (lambda n, ranks, way: by_kind(n, ranks, way) / 2**20, FOUR),
    "elements": (lambda n, ranks, way: by_kind(n, ranks, way) / 4, FOUR),
    "all sharded": (lambda n, ranks, way: by_kind(n, ranks, "DDP") / ranks, FOUR),
    "on all ranks": (lambda n, ranks, way: by_kind(n, 1, way) * ranks, FOUR),
    "a view has buckets": (
        lambda n, ranks, way: 20 * n if "DDP" in way else 16 * n / ranks,
        "counted twice",
    ),
    "a view has no gradients": (
        lambda n, ranks, way: 12 * n if "view" in way else by_kind(n, ranks, way),
        "counted twice",
    ),
    "nothing sharded": (lambda n, ranks, way: by_kind(n, 1, way), HELD),
    "always two ranks": (lambda n, ranks, way: by_kind(n, 2, way), HELD),
    "parameters are whole": (of_fsdp(lambda n, ranks: 4 * n + 12 * n / ranks), HELD),
    "gradients are whole": (of_fsdp(lambda n, ranks: 4 * n + 12 * n / ranks), HELD),
    "the optimizer is whole": (of_fsdp(lambda n, ranks: 8 * n + 8 * n / ranks), HELD),
    "buckets, too": (of_fsdp(lambda n, ranks: 20 * n / ranks), HELD),
    "by the root": (of_fsdp(lambda n, ranks: 16 * n / ranks**0.5 * 2**0.5 / 2), HELD),
}
EQUIVALENT: dict = {}
IN_TESTS = ["one formula", "always two ranks"]
