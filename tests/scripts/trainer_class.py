"""A class that trains, with a snapshot of its own from which a restart goes on.

trainer_class.py EPOCHS FOLDER [--dies-once]
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(96, 5, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum().reshape(1)


class Trainer:
    def __init__(self, model, data, optimizer, snapshot):
        self.rank = int(os.environ["RANK"])
        self.data = data
        self.optimizer = optimizer
        self.snapshot = snapshot
        self.first_epoch = 0
        if snapshot.exists():
            state = torch.load(snapshot)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            self.first_epoch = state["epochs"]
            print(f"goes on in epoch {self.first_epoch}")
        self.model = DDP(model)

    def train(self, epochs, mark):
        for epoch in range(self.first_epoch, epochs):
            self.data.sampler.set_epoch(epoch)
            for x, y in self.data:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(x), y)
                loss.backward()
                self.optimizer.step()
            if self.rank == 0:
                state = {"model": self.model.module.state_dict(), "epochs": epoch + 1}
                torch.save({**state, "optimizer": self.optimizer.state_dict()}, self.snapshot)
            torch.distributed.barrier()
            if mark is not None and self.rank == 1 and epoch == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dies-once", action="store_true")
    given = parser.parse_args()
    init_process_group("gloo")
    torch.manual_seed(0)
    data = Points()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=1)
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = Trainer(model, loader, optimizer, given.folder / "snapshot.pt")
    trainer.train(given.epochs, given.folder / "mark" if given.dies_once else None)
    with torch.no_grad():
        loss = trainer.model(data.x).square().mean()  # on every rank
    if trainer.rank == 0:
        print("RESULT", loss.item())
    destroy_process_group()


if __name__ == "__main__":
    main()
