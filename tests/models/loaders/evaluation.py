"""A module that logs in every way, and what its evaluations give on this rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import SpearmanCorrCoef

from lightning_lockstep import (
    LockstepDDPStrategy,
    LockstepDeepSpeedStrategy,
    LockstepFSDPStrategy,
    LockstepMPIStrategy,
)
from lightning_lockstep._lightning import (
    Callback,
    CombinedLoader,
    EarlyStopping,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    seed_everything,
)
from tests import harness
from tests.harness import on_device

#: Of all ranks together, which 1 to 4 ranks divide.
GLOBAL_BATCH = 12
SAMPLES = (1, 2, 5, 13, 37)
QUIET = {**harness.QUIET, "num_sanity_val_steps": 0}


class Rows(Dataset[Any]):
    """Samples that know their number, which is their first value."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.inputs = torch.randn(samples, 4, generator=generator)
        self.targets = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> Any:
        return self.inputs[number], self.targets[number], number


class OfEach(Metric):
    """Keeps a tensor of each sample in a list, as the mean average precision and ROUGE do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", [], dist_reduce_fx=None)
        self.add_state("sizes", [], dist_reduce_fx=None)

    def update(self, outputs: Tensor) -> None:
        self.found.extend(outputs)
        self.sizes.extend(outputs.sum(1))

    def compute(self) -> Tensor:
        weights = torch.arange(1, len(self.sizes) + 1, device=self.sizes[0].device)
        return (torch.stack(list(self.sizes)) * weights).sum() + torch.stack(list(self.found)).mean()


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.both = MetricCollection({"f1": MulticlassF1Score(3), "macro": MulticlassAccuracy(3)})
        self.area, self.each = MulticlassAUROC(3), OfEach()
        self.in_list = [SpearmanCorrCoef()]
        self.several = False

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(inputs).relu())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        batches = batch if isinstance(batch[0], list) else [batch]
        for one in batches:
            if one is not None:
                self.logged(one)

    test_step = validation_step

    def logged(self, batch: Any) -> None:
        inputs, targets, numbers = batch
        outputs = self(inputs)
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        if self.global_rank > 0 and 0 in numbers:
            losses = losses * torch.nan  # sample 0 is that of rank 0: here it is a padding sample
        self.log("loss", losses.mean())
        self.log("synced", losses.mean(), sync_dist=True)
        self.log("stepped", losses.mean(), on_step=True, on_epoch=True)
        self.log("least", losses.min(), reduce_fx="min")
        self.log("most", losses.max(), reduce_fx="max")
        self.log("total", losses.sum(), reduce_fx="sum")
        self.log("total synced", losses.sum(), reduce_fx="sum", sync_dist=True)
        if (targets == 1).any():
            self.log("of some", losses[targets == 1].mean(), batch_size=int((targets == 1).sum()))
        self.log("double", losses.double().mean())
        if not self.several:  # a metric of several loaders is read before it has all of them
            self.accuracy(outputs, targets)
            self.log("accuracy", self.accuracy)
            for metric, values in ((self.both, targets), (self.area, targets)):
                metric.update(outputs.softmax(1), values)
            self.each.update(outputs)
            self.in_list[0].to(self.device).update(outputs[:, 0], outputs[:, 1])

    def on_validation_epoch_end(self) -> None:
        if not self.several:
            self.log_dict(self.both.compute())
            for name, metric in {"area": self.area, "each": self.each, "list": self.in_list[0]}.items():
                self.log(name, metric.compute())
                metric.reset()
            self.both.reset()
        self.log("hook", float(self.global_rank))
        self.log("sum of the epoch", 7.0, reduce_fx="sum")
        self.log("rank zero", float(self.global_rank), rank_zero_only=True)

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.cat([batch[2][:, None].float(), self(batch[0])], 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.batches += indices

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = [
            (int(row[0]), index)
            for rows, found in zip(predictions, indices[0], strict=True)
            for row, index in zip(rows, found, strict=True)
        ]


class InCallback(Callback):
    """Has a metric, and counts what each batch ends with."""

    def __init__(self) -> None:
        self.metric = MulticlassAccuracy(3, average="micro")

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.metric.to(pl_module.device).update(batch[0].argmax(1) % 3, batch[1])

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("callback", self.metric.compute())
        self.metric.reset()


STRATEGIES: dict[str, Callable[[], Any]] = {
    "Lightning": lambda: "auto",  # on one device
    "ddp": LockstepDDPStrategy,
    "fsdp": LockstepFSDPStrategy,
    "mpi": lambda: LockstepMPIStrategy(backend="auto"),
    "deepspeed 3": lambda: LockstepDeepSpeedStrategy(stage=3),
}


def loader(samples: int, ranks: int) -> DataLoader[Any]:
    return DataLoader(Rows(samples), GLOBAL_BATCH // ranks)


def net() -> Net:
    seed_everything(3, verbose=False)
    return Net()


def evaluations(strategy: str, ranks: int, samples: tuple[int, ...] = SAMPLES) -> dict[str, Any]:
    """What this rank gets of all of them."""
    found: dict[str, Any] = {}

    def trainer(**options: Any) -> Trainer:
        return Trainer(**{**QUIET, **on_device(ranks), **options}, strategy=STRATEGIES[strategy]())

    for number in samples:
        one = trainer(callbacks=[InCallback()])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using `DistributedSampler` with the dataloaders")
            one.test(net(), loader(number, ranks), verbose=False)
        found[f"test {number}"] = values(one)
    several = net()
    several.several = True
    one = trainer()
    answer = one.validate(several, [loader(n, ranks) for n in (13, 1, 25)], verbose=False)
    found["several"] = {**values(one), **{f"{i} {k}": v for i, d in enumerate(answer) for k, v in d.items()}}
    one = trainer(limit_val_batches=2)
    one.validate(net(), loader(37, ranks), verbose=False)
    found["limited"] = values(one)
    one = trainer()
    joined = CombinedLoader([loader(13, ranks), loader(13, ranks)], "max_size")
    one.validate(several, joined, verbose=False)
    found["joined"] = values(one)
    found["advice"] = [text for text in warning_cache if "sync_dist" in text and "rank zero" not in text]
    found["fit"] = fitted(trainer, ranks)
    found["predict"] = {number: predicted(trainer, ranks, number) for number in (1, 2, 13)}
    return found


def fitted(trainer: Callable[..., Trainer], ranks: int) -> dict[str, Any]:
    """A fit with a sanity check, which stops by a value that is logged, and keeps the best weights by it."""
    stop = EarlyStopping("of some", patience=1, min_delta=10.0)
    keep = ModelCheckpoint(os.environ.get("TMPDIR", "/tmp") + f"/evaluation-{ranks}", monitor="loss")
    one = trainer(
        callbacks=[stop, keep],
        max_epochs=5,
        num_sanity_val_steps=2,
        enable_checkpointing=True,
        limit_train_batches=1,
    )
    one.fit(net(), loader(GLOBAL_BATCH, ranks), loader(2, ranks))  # one batch, in any order
    return {
        "epochs": one.current_epoch,
        "best": float(keep.best_model_score),
        "stop": float(stop.best_score),
        **values(one),
    }


class Plain(Net):
    """Reduces nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def logged(self, batch: Any) -> None:
        inputs, targets, _ = batch
        self.log("loss", nn.functional.cross_entropy(self(inputs), targets))

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 1:
            self.log("one", 1.0)


def parts_of_ranks(counts: list[list[int]]) -> list[dict[str, float]]:
    """What each rank gets that has made loaders of its own; ``counts`` has, for each, the samples of the ranks."""
    found, rank = [], int(os.environ["RANK"])
    for samples in (counts[:1], counts[1:2], counts):
        loaders = []
        for of_ranks in samples:
            start = sum(of_ranks[:rank])
            loaders.append(DataLoader(Subset(Rows(13), range(start, start + of_ranks[rank])), 2))
        one = Trainer(
            **{**QUIET, **on_device(len(counts[0]))},
            strategy=LockstepDDPStrategy(),
            use_distributed_sampler=False,
        )
        seed_everything(3, verbose=False)
        one.validate(Plain(), loaders, verbose=False)
        found.append(values(one))
    return found


def values(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def predicted(trainer: Callable[..., Trainer], ranks: int, number: int) -> dict[str, Any]:
    writer = Writer()
    rows = trainer(callbacks=[writer]).predict(net(), loader(number, ranks))
    return {
        "rows": [row.tolist() for batch in rows or [] for row in batch],
        "batches": writer.batches,
        "epoch": writer.epoch,
    }
