"""Accelerate: it shards the batches of a loader, and averages gradients."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
if accelerator.is_local_main_process:
    print("HOST", accelerator.process_index, flush=True)
x = torch.randn(64, 5)
data = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for _ in range(2):
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
losses = accelerator.gather(loss.detach().reshape(1))
if accelerator.is_main_process:
    weights = torch.nn.utils.parameters_to_vector(model.parameters())
    print("RESULT", weights.norm().item() + losses.sum().item())
accelerator.end_training()
