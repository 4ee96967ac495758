"""What both trainings share: data modules with a global batch, and a classifier whose metrics are reduced properly."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_lockstep._lightning import LightningDataModule, LightningModule
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import counted
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.loaders.global_order import micro_batches

# -- What the two data modules share: the batch size, checked and divided, and the loaders --


class GlobalBatchDataModule(LightningDataModule):
    """A data module whose global batches are the same on any number of ranks."""

    # A subclass fills `self._splits` with the data sets `"train"`, `"val"` and `"test"` in `setup`.

    def __init__(
        self,
        faults: Faults,  # that a subclass finds in its own settings
        *,
        # Samples per rank and micro-batch; a search may change the attribute between two loaders.
        batch_size: int,
        global_batch_size: int | None,  # samples of all ranks in one optimizer step; gives `batch_size`
        num_workers: int = 0,  # loader processes per rank
    ) -> None:
        super().__init__()
        faults.whole("batch_size", batch_size, what="samples per rank, a whole number")
        what = "samples of all ranks in one optimizer step, a whole number"
        faults.whole("global_batch_size", global_batch_size, what=what, optional=True)
        faults.whole("num_workers", num_workers, least=0, what="processes per rank, a whole number")
        faults.raise_all()
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.num_workers = num_workers
        self._splits: dict[str, Dataset[Any]] = {}
        self._divided = False

    def train_dataloader(self) -> DataLoader[Any]:
        """Loader of the shuffled training samples; what fills no global batch waits for another epoch's order."""
        samples, ranks, accumulate = len(self._splits["train"]), 1, 1  # type: ignore[arg-type]
        if self.trainer is not None:
            ranks, accumulate = self.trainer.world_size, self.trainer.accumulate_grad_batches
        if self.global_batch_size is not None and not self._divided:
            # Once only: a callback that changes the batch size afterwards overrides it.
            sizes = micro_batches(self.global_batch_size, accumulate)
            self.batch_size, self._divided = -(-max(sizes) // ranks), True
            if self.trainer is not None and hasattr(self.trainer.strategy, "micro_batches"):
                self.trainer.strategy.micro_batches = sizes
        needed = self.global_batch_size if self._divided else self.batch_size * ranks * accumulate
        if needed is not None and samples < needed:
            raise ConfigurationError(
                f"one global batch of {needed} samples ({counted(ranks, 'rank')}, {accumulate} accumulated) is larger"
                f" than the {samples} training samples; make it smaller"
            )
        return self._loader("train", shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Loader of the validation samples."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Loader of the test samples."""
        return self._loader("test")

    def _loader(self, split: str, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            self._splits[split],
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            **options,
        )


# -- The steps of a classifier that both models share: loss, metrics over all ranks, optimizer --


class ClassifierModule(LightningModule):
    """Cross entropy and accuracy over the last dimension of the model's output."""

    # Logged: `train_loss` every step, its mean over all ranks; `val_loss`, `val_acc`, `test_loss`, `test_acc` at the
    # end of an evaluation, over all samples of all ranks, each sample with the same weight however they are divided.

    def __init__(
        self,
        faults: Faults,  # that a subclass finds in its own settings
        *,
        learning_rate: float,
        weight_decay: float = 0.01,  # of AdamW, on matrices only
        warmup_steps: int = 0,  # over which the learning rate rises from 0 [optimizer steps]
    ) -> None:
        faults.number("learning_rate", learning_rate, above=0)
        faults.number("weight_decay", weight_decay, least=0)
        faults.whole("warmup_steps", warmup_steps, least=0, what="optimizer steps, a whole number")
        faults.raise_all()
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        # Sums, not means of batch means: the value is then the same for every division among ranks.
        self.metrics = nn.ModuleDict(
            {f"{split}_{name}": MeanMetric() for split in ("val", "test") for name in ("loss", "acc")}
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy of this rank's micro-batch [nats]."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self(inputs).flatten(0, -2), targets.flatten())
        self.log("train_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(targets))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add one batch to the metrics of the validation or the test."""
        split = "test" if self.trainer.testing else "val"
        inputs, targets = batch
        logits, labels = self(inputs).flatten(0, -2), targets.flatten()
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        for name, values in (("loss", losses), ("acc", (logits.argmax(-1) == labels).float())):
            metric = cast(MeanMetric, self.metrics[f"{split}_{name}"])
            metric.update(values.detach())
            self.log(f"{split}_{name}", metric, prog_bar=True, batch_size=len(targets))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        """AdamW, with a linear rise of the learning rate when `warmup_steps` is given."""
        matrices = [weight for weight in self.parameters() if weight.requires_grad and weight.ndim >= 2]
        others = [weight for weight in self.parameters() if weight.requires_grad and weight.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, weight_decay=self.weight_decay)
        if self.warmup_steps == 0:
            return optimizer
        rise = torch.optim.lr_scheduler.LambdaLR(optimizer, self._warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rise, "interval": "step"}}

    def _warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup_steps)
