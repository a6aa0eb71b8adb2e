"""Record two ranks, one of which is slowed, and draw their steps: docs/pictures/timeline.png.

.venv/bin/python docs/pictures/draw_timeline.py
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddp_common as ddp

PICTURE = Path(__file__).with_name("timeline.png")
SLOW = 0.02  # seconds that rank 1 takes longer to prepare a batch

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def slowed(rows):
    if ddp.rank() == 1:
        time.sleep(SLOW)
    return torch.utils.data.default_collate(rows)


def train():
    layers = [torch.nn.Linear(256, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 256)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    rows = TensorDataset(torch.randn(32 * 12, 256))
    ddp.trace(steps=4, skip=4)
    for (batch,) in DataLoader(rows, batch_size=32, collate_fn=slowed):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def main():
    with ddp.connect("local", workers=2) as client, tempfile.TemporaryDirectory() as folder:
        run = ddp.launch(client, train, directory=f"{folder}/run")
        shutil.copy(run.timeline().picture, PICTURE)
    print(f"{PICTURE.name}: drawn")


if __name__ == "__main__":
    main()
