"""The training under submitit, on Slurm.

As in docs/examples/torch_distributed.py of submitit, and with the loop of PyTorch's tutorial,
since submitit has no checkpoints of weights of its own.
"""

import os

import probe
import submitit
import task
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

SNAPSHOT = "snapshot.pt"


def train():
    submitit.helpers.TorchDistributedEnvironment().export()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = task.data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=task.BATCH // dist.get_world_size(), sampler=sampler)
    model = task.Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LEARNING_RATE)
    epochs_run = 0
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        epochs_run = snapshot["epochs_run"]
    model = DDP(model)
    for epoch in range(epochs_run, task.EPOCHS):
        sampler.set_epoch(epoch)
        for rows, classes, samples in loader:
            loss = cross_entropy(model(rows), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.stepped(model, epoch, samples)
        if dist.get_rank() == 0:
            snapshot = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epochs_run": epoch + 1,
            }
            torch.save(snapshot, SNAPSHOT)
    dist.destroy_process_group()


def main():
    executor = submitit.AutoExecutor(folder="logs")
    executor.update_parameters(
        nodes=1, tasks_per_node=task.RANKS, cpus_per_task=1, mem_gb=2, timeout_min=5
    )
    job = executor.submit(train)
    job.results()


if __name__ == "__main__":
    main()
