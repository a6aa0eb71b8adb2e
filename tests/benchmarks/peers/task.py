"""The training that all peers do: the same model, data and numbers. Their scripts import it."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, FEATURES, CLASSES = 4096, 32, 8
BATCH = 64  # samples of a step, of all ranks together
EPOCHS = 2  # of 64 steps
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "16"))  # steps, where a peer saves by steps
LEARNING_RATE = 0.1
RANKS = int(os.environ.get("RANKS", "2"))


class Network(nn.Module):
    """A small perceptron: float32 (rows, FEATURES) in, scores (rows, CLASSES) out.

    `steps` counts how many steps are in the weights. It is saved and loaded with them, and no
    gradient reaches it.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
        )
        self.scores = nn.Linear(128, CLASSES)
        self.steps = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)

    def forward(self, rows):
        with torch.no_grad():
            self.steps += 1
        return self.scores(self.layers(rows))


def data():
    """Rows, their classes, and the number of each sample, which only the benchmark looks at."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(SAMPLES, FEATURES, generator=generator)
    classes = (rows @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
    return TensorDataset(rows, classes, torch.arange(SAMPLES))
