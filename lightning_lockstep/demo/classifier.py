"""The steps of a classifier that both models share: loss, metrics over all ranks, optimizer."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_lockstep._lightning import LightningModule
from lightning_lockstep._settings import Faults


class ClassifierModule(LightningModule):
    """Cross entropy and accuracy over the last dimension of the model's output.

    Logged: `train_loss` every step; `val_loss`, `val_acc`, `test_loss`, `test_acc` at the end of an
    evaluation, over all samples of all ranks, each sample with the same weight however the samples are divided.
    """

    takes: ClassVar[str | None] = None  # samples it is trained on (see `demo.data_module`); None: any

    def __init__(
        self,
        faults: Faults,  # that a subclass finds in its own settings
        *,
        learning_rate: float,
        weight_decay: float = 0.01,  # of AdamW, on matrices only
        warmup_steps: int = 0,  # over which the learning rate rises from 0 [optimizer steps]
        global_train_loss: bool = True,  # over all ranks (a scalar reduction a step), or rank 0's own
    ) -> None:
        faults.number("learning_rate", learning_rate, above=0)
        faults.number("weight_decay", weight_decay, least=0)
        faults.whole("warmup_steps", warmup_steps, least=0, what="optimizer steps, a whole number")
        faults.raise_all()
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.global_train_loss = global_train_loss
        # Sums, not means of batch means: the value is then the same for every division among ranks.
        self.metrics = nn.ModuleDict(
            {f"{split}_{name}": MeanMetric() for split in ("val", "test") for name in ("loss", "acc")}
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy of this rank's micro-batch [nats]."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self(inputs).flatten(0, -2), targets.flatten())
        self.log("train_loss", loss, prog_bar=True, sync_dist=self.global_train_loss, batch_size=len(targets))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add one batch to the validation metrics."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add one batch to the test metrics."""
        self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        logits, labels = self(inputs).flatten(0, -2), targets.flatten()
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        for name, values in (("loss", losses), ("acc", (logits.argmax(-1) == labels).float())):
            metric = cast(MeanMetric, self.metrics[f"{split}_{name}"])
            metric.update(values.detach())
            self.log(
                f"{split}_{name}",
                metric,
                on_step=False,
                on_epoch=True,
                prog_bar=True,
                batch_size=len(targets),
            )

    def configure_optimizers(self) -> Any:
        """AdamW, with a linear rise of the learning rate when `warmup_steps` is given."""
        matrices = [weight for weight in self.parameters() if weight.requires_grad and weight.ndim >= 2]
        others = [weight for weight in self.parameters() if weight.requires_grad and weight.ndim < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self.learning_rate,
        )
        if self.warmup_steps == 0:
            return optimizer
        rise = torch.optim.lr_scheduler.LambdaLR(optimizer, self._warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rise, "interval": "step"}}

    def _warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup_steps)
