"""Train an autoencoder on handwritten digits, in one process.

    python plain_loop.py digits-images-idx3-ubyte.gz

The last digits of the file are held out: it prints their loss in the end. It writes
the trained weights to model.pt in the current folder.
"""

import gzip
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
BATCH_SIZE = 128
LEARNING_RATE = 15
HELD_OUT = 1_000  # digits, the last ones of the file


def read_digits(path):
    """The digits of an IDX file: floats (n, 784), 0 for paper, 1 for ink."""
    with gzip.open(path) as file:
        values = np.frombuffer(file.read(), np.uint8, offset=16)
    return torch.from_numpy(values.reshape(-1, 784) / np.float32(255))


def autoencoder(hidden=128, bottleneck=8):
    squeeze = [nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, bottleneck)]
    draw = [nn.Linear(bottleneck, hidden), nn.ReLU(), nn.Linear(hidden, 784)]
    return nn.Sequential(*squeeze, *draw)


def main(path):
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pixels = read_digits(path)
    data, held_out = TensorDataset(pixels[:-HELD_OUT]), pixels[-HELD_OUT:]
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = autoencoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(EPOCHS):
        losses = []
        for (digits,) in loader:
            digits = digits.to(device)
            loss = F.mse_loss(model(digits), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}")
    with torch.no_grad():
        held_out = held_out.to(device)
        loss = F.mse_loss(model(held_out), held_out)
    print(f"held out: loss {loss:.4f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main(sys.argv[1])
