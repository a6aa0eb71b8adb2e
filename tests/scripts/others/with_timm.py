"""timm: its process group, model, loss, optimizer and schedule, and batch norm at the end."""

import argparse

import timm
import torch
from timm import utils
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

args = argparse.Namespace(device="cpu")
device = utils.init_distributed_device(args)
utils.random_seed(0, 0)
images = TensorDataset(torch.randn(32, 3, 32, 32), torch.randint(4, (32,)))
model = timm.create_model("test_resnet", pretrained=False, num_classes=4).to(device)
model = DDP(model)
optimizer = create_optimizer_v2(model, opt="lamb", lr=0.01, weight_decay=0.05)
schedule, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2)
criterion = LabelSmoothingCrossEntropy(0.1)
sampler = DistributedSampler(images)
utils.random_seed(0, args.rank)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(images, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    schedule.step(epoch + 1)
utils.distribute_bn(model, args.world_size, reduce=True)
loss = utils.reduce_tensor(loss.detach(), args.world_size)
if utils.is_primary(args):
    weights = torch.nn.utils.parameters_to_vector(model.parameters())
    print("RESULT", weights.norm().item() + loss.item())
torch.distributed.destroy_process_group()
