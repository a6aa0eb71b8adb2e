"""Lightning: its Trainer puts a DistributedSampler into the loader, and wraps the module.

with_lightning.py DEVICES NODES
"""

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 1)

    def training_step(self, batch, number):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(0)
x = torch.randn(64, 5)
data = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = Regression()
trainer = lightning.Trainer(
    devices=int(sys.argv[1]),
    num_nodes=int(sys.argv[2]),
    strategy="ddp",
    accelerator="cpu",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
if trainer.local_rank == 0:
    print("HOST", trainer.node_rank, flush=True)
trainer.fit(model, data)
if trainer.is_global_zero:
    print("RESULT", model.layer.weight.norm().item() + trainer.callback_metrics["loss"].item())
torch.distributed.destroy_process_group()
