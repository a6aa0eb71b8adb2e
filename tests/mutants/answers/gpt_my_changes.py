"""Answers to exercise B of `gpt`: four slow runs. Each is timed, so few are here."""

import numpy as np

TOLD = {
    "A": {"num_workers": 2},
    "B": {"average_every": 4},
    "C": {"log_rows": False},
    "D": {"batch_size": 32},
}


def changes(**other):
    return lambda: {**TOLD, **other}


PROGRAM = {"batch_size": 4, "num_workers": 0, "average_every": 1, "log_rows": True}
RIGHT = {
    "as told": changes(),
    "other values": changes(A={"num_workers": 4}, B={"batch_size": 64}, C={"log_rows": 0}),
    "a value that stays": changes(B={"average_every": 16, "batch_size": 4}),
    "whole programs": changes(C={"log_rows": None}, A={**PROGRAM, "num_workers": 3}),
    "numpy": changes(A={"num_workers": np.int64(4)}, D={"batch_size": np.int64(32)}),
}
WRONG = {
    "a list": (lambda: [1, 2, 3, 4], "name of a setting"),
    "one alone": (lambda: {"A": {"num_workers": 2}}, "no change of run B"),
    "text": (changes(A="num_workers=2"), "run A: 'num_workers=2'"),
    "a pair": (changes(A=("num_workers", 2)), "What does your function return"),
    "another name": (changes(A={"workers": 2}), "'workers'"),
    "less than none": (changes(A={"num_workers": -1}), "whole number from 0"),
    "a million": (changes(A={"num_workers": 10**6}), "whole number from 0"),
    "never averaged": (changes(B={"average_every": 0}), "whole number from 1"),
    "half a step": (changes(B={"average_every": 2.5}), "whole number from 1"),
    "after the end": (changes(B={"average_every": 64}), "before DDP averages"),
    "no change": (changes(A={}), "0 changed settings"),
    "the same": (changes(C={"log_rows": True}), "0 changed settings"),
    "two changes": (changes(C={"log_rows": False, "num_workers": 2}), "2 changed settings"),
    "two of D": (changes(D={"batch_size": 64, "average_every": 4}), "2 changed settings"),
    "A: batches": (changes(A={"batch_size": 32}), "same time"),
    "A: seldom averaged": (changes(A={"average_every": 16}), "same time"),
    "A: no log": (changes(A={"log_rows": False}), "same time"),
    # One worker in A is too few where a step reads longer than it computes: not on slow cores.
    "B: workers": (changes(B={"num_workers": 2}), "fewer of them"),
    "B: no log": (changes(B={"log_rows": False}), "fewer of them"),
    "C: batches": (changes(C={"batch_size": 32}), "What does rank 1 do"),
    "C: seldom averaged": (changes(C={"average_every": 8}), "What does rank 1 do"),
    "C: workers": (changes(C={"num_workers": 2}), "What does rank 1 do"),
    "D: no log": (changes(D={"log_rows": False}), "fewer steps"),
    "D: workers": (changes(D={"num_workers": 2}), "fewer steps"),
}
EVERY = 0  # numbers of the solution may be others
EQUIVALENT: dict = {}
IN_TESTS = ["other values", "A: no log"]
