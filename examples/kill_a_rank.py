"""Three of four ranks kill themselves, and the fit goes on: the last lines say who was lost; the loss is the same."""

import os
import signal

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepDDPStrategy

# Which rank kills itself at which step; without any: KILLS= python kill_a_rank.py
KILLS = dict(one.split("@") for one in os.environ.get("KILLS", "2@10,0@20,3@30").split(",") if one)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        if KILLS.get(os.environ["LOCAL_RANK"]) == str(self.trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


seed_everything(1, verbose=False)
inputs = torch.randn(512, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
strategy = LockstepDDPStrategy(on_lost_rank="continue")
trainer = Trainer(
    accelerator="cpu", devices=4, strategy=strategy, max_epochs=3, logger=False, enable_checkpointing=False
)
net = Net()
trainer.fit(net, DataLoader(data, batch_size=8, shuffle=True))
if trainer.is_global_zero:
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(net.layers(inputs), data.tensors[1])
    print(f"{trainer.global_step} steps, now on {trainer.world_size} rank(s); loss {loss:.5f}")
