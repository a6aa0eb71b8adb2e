"""What torchrun gives each rank, and what DistributedSampler deals to it.

torchrun --standalone --nproc-per-node 2 hello_ranks.py
"""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
print(f"rank {rank} of {dist.get_world_size()}, number {local_rank} on its machine")

sampler = DistributedSampler(range(8), shuffle=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    print(f"rank {rank}, epoch {epoch}: samples {list(sampler)}")

dist.barrier()  # nobody leaves while another is still joining
dist.destroy_process_group()
