"""The user's script of the topic `failures` and of the pictures: two ranks, ten steps, and one thing that goes wrong.

FAULT in the environment names it (see ``FAULTS`` in bench_failures.py); rank 1 meets it in step 5. With a strategy of
ours the callback that is there for it is used too. The time of the fault is written to ``fault``.
"""

import argparse
import os
import queue
import signal
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="lockstep_ddp")
parser.add_argument("--stall-timeout", type=float)
given = parser.parse_args()
FAULT, OURS = os.environ.get("FAULT"), given.strategy.startswith("lockstep")


class Samples(IterableDataset):
    """The same forty samples wherever it is read."""

    def __iter__(self):
        yield from torch.randn(40, 8, generator=torch.Generator().manual_seed(1))


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.automatic_optimization = FAULT != "gradients"
        self.seen = []

    def training_step(self, batch, batch_idx):
        inputs = batch if FAULT == "data" else batch[0]
        self.seen.append(inputs.sum().item())
        loss = self.layer(inputs).square().mean()
        if batch_idx == (2 if FAULT == "uneven" else 5) and self.global_rank == 1:
            loss = self.check_targets(loss)
        if batch_idx == 5 and FAULT == "shapes":
            torch.distributed.all_reduce(torch.zeros(3 + self.global_rank))
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            loss.backward()
            self.optimizers().step()
        return loss

    def check_targets(self, loss):
        Path("fault").write_text(repr(time.time()))
        if FAULT == "raise":
            raise ValueError("sample 1337 has no target")
        if FAULT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "never":
            queue.Queue().get()
        return loss * torch.nan if FAULT == "nan" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        if FAULT == "data":
            return DataLoader(Samples(), batch_size=4)
        batches = 4 if FAULT == "uneven" and self.global_rank == 1 else 10
        return DataLoader(TensorDataset(torch.randn(4 * batches, 8)), batch_size=4)


def strategy():
    if given.stall_timeout is None:
        return given.strategy
    return lightning_lockstep.LockstepDDPStrategy(stall_timeout=given.stall_timeout)


def callbacks():
    if OURS and FAULT in ("gradients", "data"):
        return [lightning_lockstep.ReplicaCheck()]
    return [lightning_lockstep.OverflowDetector()] if OURS and FAULT == "nan" else []


def main():
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(),
        max_epochs=1,
        callbacks=callbacks(),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module)
    weights = module.all_gather(module.layer.weight.detach())
    seen = module.all_gather(torch.tensor(module.seen)).flatten()
    if trainer.is_global_zero:
        difference = (weights[0] - weights[1]).abs().max() / weights.abs().max()
        print(
            f"trained: {len(seen.unique())} of {len(seen)} batches differ; weights of the ranks differ by "
            f"{difference:.0%} of the largest; {weights.isnan().sum()} of {weights.numel()} weights are nan",
            flush=True,
        )


if __name__ == "__main__":
    main()
