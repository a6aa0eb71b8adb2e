"""The training under Hugging Face accelerate.

As in its pages "Launching distributed training from Jupyter Notebooks" and "Checkpointing", and
in its example by_feature/checkpointing.py: a checkpoint each so many steps, whose name says how
many, and `skip_first_batches` to go on in mid-epoch. `use_seedable_sampler` makes the order of an
epoch one that can be had again.
"""

import os

import probe
import task
import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def train():
    set_seed(0)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    loader = DataLoader(
        task.data(), batch_size=task.BATCH // accelerator.num_processes, shuffle=True
    )
    model = task.Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    if os.path.exists("checkpoints"):
        newest = max(os.listdir("checkpoints"), key=lambda name: int(name.split("_")[1]))
        accelerator.load_state(os.path.join("checkpoints", newest))
        done = int(newest.split("_")[1])
    start_epoch, start_step = divmod(done, len(loader))
    for epoch in range(start_epoch, task.EPOCHS):
        loader.set_epoch(epoch)
        active_loader = loader
        if epoch == start_epoch and start_step > 0:
            active_loader = accelerator.skip_first_batches(loader, start_step)
        for rows, classes, samples in active_loader:
            loss = cross_entropy(model(rows), classes)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            done += 1
            probe.stepped(model, epoch, samples)
            if done % task.SAVE_EVERY == 0:
                accelerator.save_state(f"checkpoints/step_{done}")


def main():
    notebook_launcher(
        train, num_processes=task.RANKS, rdzv_backend="c10d", rdzv_endpoint="localhost:0"
    )


if __name__ == "__main__":
    main()
