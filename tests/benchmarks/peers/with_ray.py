"""The training under Ray Train.

As in its pages "Get Started with Distributed Training using PyTorch", "Saving and Loading
Checkpoints" and "Handling Failures and Node Preemption": a checkpoint is reported at the end of
each epoch, and a run with the same name and storage path goes on from the newest one.
"""

import os
import tempfile

import probe
import ray.train
import ray.train.torch
import task
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def train():
    context = ray.train.get_context()
    torch.manual_seed(0)
    loader = DataLoader(
        task.data(), batch_size=task.BATCH // context.get_world_size(), shuffle=True
    )
    loader = ray.train.torch.prepare_data_loader(loader)
    network = task.Network()
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LEARNING_RATE)
    start_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, task.EPOCHS):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for rows, classes, samples in loader:
            loss = cross_entropy(model(rows), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.stepped(model, epoch, samples)
        metrics = {"loss": loss.item()}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if context.get_world_rank() == 0:
                state = {
                    "model": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, os.path.join(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


def main():
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=task.RANKS),
        run_config=RunConfig(name="run", storage_path=os.path.abspath("storage")),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
