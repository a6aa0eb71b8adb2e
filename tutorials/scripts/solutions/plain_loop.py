"""Train an autoencoder on handwritten digits, on as many ranks as torchrun starts.

    torchrun --standalone --nproc-per-node 2 plain_loop.py digits-images-idx3-ubyte.gz

The last digits of the file are held out: rank 0 prints their loss in the end. It
writes the trained weights to model.pt in the current folder.
"""

import gzip
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3
BATCH_SIZE = 128  # of all ranks together
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
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    pixels = read_digits(path)
    data, held_out = TensorDataset(pixels[:-HELD_OUT]), pixels[-HELD_OUT:]
    sampler = DistributedSampler(data, shuffle=True)
    per_rank = BATCH_SIZE // dist.get_world_size()
    loader = DataLoader(data, batch_size=per_rank, sampler=sampler)
    model = autoencoder().to(device)
    model = DDP(model, device_ids=[local_rank] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses = []
        for (digits,) in loader:
            digits = digits.to(device)
            loss = F.mse_loss(model(digits), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}")
    with torch.no_grad():  # on all ranks: none may leave right after a backward
        held_out = held_out.to(device)
        loss = F.mse_loss(model.module(held_out), held_out)
    if dist.get_rank() == 0:
        print(f"held out: loss {loss:.4f}")
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
