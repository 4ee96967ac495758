"""Two ranks that train without an error, and are no longer one model: four ways, each found by ReplicaCheck.

python examples/out_of_step.py backward     # loss.backward() in manual optimization: no gradient is reduced
python examples/out_of_step.py data         # an iterable data set that gives both ranks the same batches
python examples/out_of_step.py step         # an optimizer that one rank does not step with
python examples/out_of_step.py weights      # a hook that writes weights on one rank
python examples/out_of_step.py backward --without --strategy ddp    # no message: exit code 0
"""

from __future__ import annotations

import argparse
import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_lockstep import ReplicaCheck


class Samples(IterableDataset):
    """The same samples wherever it is read."""

    def __init__(self, share: slice) -> None:
        self.share = share

    def __iter__(self):
        yield from torch.randn(400, 8, generator=torch.Generator().manual_seed(1))[self.share]


class Module(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.way = way
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
        if self.way == "backward":
            loss.backward()
        else:
            self.manual_backward(loss)
        if self.way == "step" and self.global_rank == 1 and batch_idx == 7:
            return
        optimizer.step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.way == "weights" and self.global_rank == 1 and batch_idx == 12:
            with torch.no_grad():
                self.layers[2].weight.clamp_(-0.05, 0.05)

    def train_dataloader(self):
        share = slice(None) if self.way == "data" else slice(self.global_rank, None, self.trainer.world_size)
        return DataLoader(Samples(share), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["backward", "data", "step", "weights", "none"])
    parser.add_argument("--strategy", default="lockstep_ddp")
    parser.add_argument("--without", action="store_true", help="without ReplicaCheck")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=given.strategy,
        max_steps=40,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if given.without else [ReplicaCheck(every_n_steps=10)],
    )
    module = Module(given.way)
    trainer.fit(module)
    weights = sum(float(parameter.detach().abs().sum()) for parameter in module.parameters())
    print(f"rank {trainer.global_rank}: sum of the weights {weights:.4f}", flush=True)


if __name__ == "__main__":
    main()
