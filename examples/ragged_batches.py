"""A last batch that is smaller than the others, as it is, left out and filled up: what is compiled, and what is learnt.

python examples/ragged_batches.py             # torch.compile, on any device
python examples/ragged_batches.py --xla       # torch-xla, on four virtual devices of the CPU
"""

from __future__ import annotations

import argparse
import logging
import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import StaticShapes

#: What is given to the DataLoader of training, and the callback.
RUNS = {
    "as they are": ({}, {}),
    "drop": ({"drop_last": True}, {"batch_size": "train"}),
    "pad": ({}, {"batch_size": "train"}),
}


class Digits(LightningModule):
    def __init__(self, compiler: str | None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.run = self.net if compiler is None else torch.compile(self.net, backend=compiler, dynamic=False)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        losses = cross_entropy(self.run(images), labels, reduction="none")
        return StaticShapes.mean(losses, batch)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.run(images)
        losses = cross_entropy(logits, labels, reduction="none")
        right = (logits.argmax(1) == labels).float()
        self.log_dict({"accuracy": StaticShapes.mean(right, batch), "loss": StaticShapes.mean(losses, batch)})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.003)


def loaders(**options) -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, held_out = (TensorDataset(images[part], labels[part]) for part in (slice(1397), slice(1397, None)))
    # Batches of 64: the last one has 53 samples in training, and 16 in validation.
    return DataLoader(train, 64, shuffle=True, **options), DataLoader(held_out, 64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    rows = []
    for name, (of_loader, of_callback) in RUNS.items():
        print(f"--- {name}", file=sys.stderr)
        seed_everything(1, verbose=False)
        torch._dynamo.reset()
        shapes = StaticShapes(**of_callback)
        trainer = Trainer(
            accelerator="cpu",
            devices=4 if given.xla else 1,
            strategy="lockstep_xla_spmd" if given.xla else "auto",
            max_epochs=3,
            callbacks=[shapes],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(None if given.xla else given.backend), *loaders(**of_loader))
        late = sum(one.graphs for one in shapes.late)
        logged = trainer.callback_metrics
        rows.append((name, late, trainer.global_step, float(logged["accuracy"]), float(logged["loss"])))
    print(f"\n{'last batch':<14}{'late graphs':>12}{'steps':>8}{'accuracy':>12}{'loss':>10}")
    for name, late, steps, accuracy, loss in rows:
        print(f"{name:<14}{late:>12}{steps:>8}{accuracy:>12.2%}{loss:>10.5f}")


if __name__ == "__main__":
    main()
