"""The training under Lightning Fabric.

As in its pages "Launch distributed training", "Saving and Loading Checkpoints" and "Template for
your own Trainer", which saves at the end of an epoch.
"""

import os

import lightning as L
import probe
import task
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

CHECKPOINT = "checkpoint.ckpt"


def main():
    fabric = L.Fabric(accelerator="cpu", strategy="ddp", devices=task.RANKS)
    fabric.launch()
    fabric.seed_everything(0)
    loader = DataLoader(task.data(), batch_size=task.BATCH // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    model = task.Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LEARNING_RATE)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if os.path.exists(CHECKPOINT):
        fabric.load(CHECKPOINT, state)
    for epoch in range(state["epoch"], task.EPOCHS):
        for rows, classes, samples in loader:
            loss = cross_entropy(model(rows), classes)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            probe.stepped(model, epoch, samples)
        state["epoch"] = epoch + 1
        fabric.save(CHECKPOINT, state)


if __name__ == "__main__":
    main()
