"""Windows of all names of pets, one for each character, and an epoch of batches of them."""

import csv

import numpy as np
import torch
from measuring import compared, seconds_in_turns
from torch.utils.data import DataLoader

import ddp_common as ddp
from tutorials import kit

ALPHABET = "*+abcdefghijklmnopqrstuvwxyz-. "  # '*' pads the beginning, '+' ends a name
WIDTH, BATCH = 8, 16_384


def measure(quick):
    torch.set_num_threads(1)  # as in a rank
    names = read_names()[: 5_000 if quick else None]
    turns = 2 if quick else 3
    for ours, other in zip(windows(names), windows_item_by_item(names)):
        assert torch.equal(ours.long(), other), "the two ways disagree"
    seconds = seconds_in_turns(
        lambda: windows(names), lambda: windows_item_by_item(names), turns=turns
    )
    what = f"windows of {len(names):,} names, s"
    yield compared(what, *seconds, beside="Python lists", speed_up=True, at_least=100)

    contexts, targets = windows(names)
    batches, items = Batches(contexts, targets), Items(contexts.long(), targets.long())
    assert by_batch(batches) == by_item(items) == len(contexts)
    seconds = seconds_in_turns(lambda: by_batch(batches), lambda: by_item(items), turns=turns)
    what = f"an epoch of these {len(contexts):,} windows, s"
    yield compared(what, *seconds, beside="item by item", speed_up=True, at_least=10)


def read_names():
    """Every registered name, as often as it was registered."""
    with open(kit.fetch("pets").path, encoding="utf-8", newline="") as file:
        return [row["name"] for row in csv.DictReader(file) for _ in range(int(row["count"]))]


def windows(names):
    """Contexts (n, WIDTH) and the characters that follow (n,), uint8 indices into ALPHABET.

    There is no loop over names.
    """
    index_of = np.zeros(256, np.uint8)
    index_of[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))
    padding = "*" * WIDTH
    text = padding + f"+{padding}".join(names) + "+"
    codes = index_of[np.frombuffer(text.encode(), np.uint8)]
    followers = codes[WIDTH:]  # one for every window but the last
    wanted = followers != ALPHABET.index("*")
    contexts = np.lib.stride_tricks.sliding_window_view(codes, WIDTH)[:-1]
    return torch.from_numpy(contexts[wanted]), torch.from_numpy(followers[wanted])


def windows_item_by_item(names):
    """The same as int64: a list for every window, a search for every character."""
    alphabet = list(ALPHABET)
    contexts, targets = [], []
    for name in names:
        letters = list(name) + ["+"]
        for position, letter in enumerate(letters):
            seen = letters[max(0, position - WIDTH) : position]
            padded = ["*"] * (WIDTH - len(seen)) + seen
            contexts.append([alphabet.index(character) for character in padded])
            targets.append(alphabet.index(letter))
    return torch.tensor(contexts), torch.tensor(targets)


class Items:
    """A data set that gives one sample at a time."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return tuple(tensor[index] for tensor in self.tensors)


class Batches(Items):
    """A data set that gives a whole batch at once, and only then widens it to int64."""

    def __getitems__(self, indices):
        return tuple(tensor[indices].long() for tensor in self.tensors)


def by_batch(data):
    """Read an epoch; returns the number of windows."""
    sampler = ddp.ElasticSampler(len(data), BATCH)
    # What it fetches is a batch already: it has no samples to collate, and none to compare
    options = {"batched": True, "compare": False, "collate_fn": lambda batch: batch}
    loader = ddp.DataLoader(data, batch_sampler=sampler, **options)
    return sum(len(targets) for _ in sampler.epochs(1) for _, targets in loader)


def by_item(data):
    return sum(len(targets) for _, targets in DataLoader(data, BATCH, shuffle=True))
