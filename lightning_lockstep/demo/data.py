"""What both trainings share: data modules with a global batch, and a classifier whose metrics are reduced properly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import MeanMetric

from lightning_lockstep._doors.lightning import LightningDataModule, LightningModule
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import counted
from lightning_lockstep.errors import ConfigurationError

# -- Who gets which sample: the same global batches on any number of ranks --
# Lightning's defaults do not promise that: on one device a `RandomSampler` draws its order from torch's
# global generator, on several a `DistributedSampler` draws another one from its own seed, and pads the last
# batch with samples that then count twice. `GlobalBatchSampler` draws one global order by seed and epoch
# whatever the number of ranks, cuts it into global batches and divides each into equal slices: one
# optimizer step sees the same samples on 1, 2 or 8 ranks, with or without accumulation, and an evaluation
# sees every sample exactly once.


@dataclass(frozen=True, kw_only=True)
class GlobalBatchPartition:
    """How the samples of one epoch are divided among the ranks."""

    samples: int  # in the data set
    batch_size: int  # samples per rank and micro-batch
    world_size: int = 1  # ranks
    accumulate: int = 1  # micro-batches per optimizer step

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return self.batch_size * self.world_size * self.accumulate

    @property
    def steps(self) -> int:
        """Full optimizer steps in one epoch; what fills no global batch waits for another epoch's order."""
        return self.samples // self.global_batch_size

    def train_indices(self, order: list[int], rank: int) -> list[int]:
        """Positions of `rank`, global batch after global batch, from the epoch's global `order`."""
        share = self.global_batch_size // self.world_size
        starts = (step * self.global_batch_size + rank * share for step in range(self.steps))
        return [index for start in starts for index in order[start : start + share]]

    def eval_indices(self, rank: int) -> list[int]:
        """Positions of `rank` when every sample is wanted once: shards differ by one sample at most."""
        return list(range(rank, self.samples, self.world_size))

    @property
    def eval_batch_size(self) -> int:
        """Smallest batch from `batch_size` up that gives every rank the same number of evaluation batches."""
        # Shards of `n` and `n + 1` samples need the same number of batches unless `n` is a multiple of the
        # batch size; one more sample per batch then removes the odd batch that only some ranks would have.
        shard, rest = divmod(self.samples, self.world_size)
        size = self.batch_size
        if rest == 0 or shard == 0:
            return size
        while shard % size == 0:
            size += 1
        return size


class GlobalBatchSampler(DistributedSampler):  # type: ignore[type-arg]
    """A sampler whose global batches are the same on any number of ranks.

    It is a `DistributedSampler`, which shows Lightning that the samples are already divided and must not be
    divided again, and lets Lightning call `set_epoch`.

    Args:
        dataset: The data; only its length is used.
        partition: How the samples are divided.
        rank: This rank.
        shuffle: `True` yields a new global order each epoch, in full batches (training); `False` yields every
            sample once, in the order of the data (evaluation).
        seed: Seed of the global order; the epoch is added to it.

    Ranks:
        Every rank builds its own with the same `partition` and `seed`. Nothing is communicated: each rank draws
        the whole permutation (8 bytes a sample) and keeps its slice.
    """

    def __init__(
        self, dataset: Sized, *, partition: GlobalBatchPartition, rank: int, shuffle: bool, seed: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas=partition.world_size, rank=rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.partition = partition
        if shuffle:
            self.num_samples = partition.steps * partition.batch_size * partition.accumulate
        else:
            self.num_samples = len(partition.eval_indices(rank))
        self.total_size = partition.samples
        # By this a run that resumes on another number of ranks knows that it goes on in the same order.
        self.global_order = f"global batches, {'shuffled, seed ' + str(seed) if shuffle else 'as they are'}"

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's positions for the epoch set by `set_epoch`."""
        if not self.shuffle:
            return iter(self.partition.eval_indices(self.rank))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.partition.samples, generator=generator).tolist()
        return iter(self.partition.train_indices(order, self.rank))

    def __len__(self) -> int:
        """Samples of this rank in one epoch."""
        return self.num_samples


def batch_size_per_rank(global_batch_size: int, world_size: int, accumulate: int) -> int:
    """Return the samples per rank and micro-batch of a global batch, which has to divide."""
    parts = world_size * accumulate
    if global_batch_size >= parts and global_batch_size % parts == 0:
        return global_batch_size // parts
    below = max(parts, global_batch_size // parts * parts)
    near = f"{below}" if below >= global_batch_size else f"{below} or {below + parts}"
    raise ConfigurationError(
        f"global_batch_size={global_batch_size} does not divide by {counted(world_size, 'rank')} x {accumulate}"
        f" accumulated micro-batches = {parts}; the nearest that does is {near}"
    )


# -- What the two data modules share: the batch size, checked and divided, and the loaders --

# What the samples of a data module are, in words (`yields`): a model fits it whose `takes` is the same.
# `lockstep-train` compares the two before it starts any rank; a class without one is not compared.
LABELLED_IMAGES = "images with a class each"
BYTE_WINDOWS = "windows of bytes"


class GlobalBatchDataModule(LightningDataModule):
    """A data module whose global batches are the same on any number of ranks."""

    # A subclass fills `self._splits` with the data sets `"train"`, `"val"` and `"test"` in `setup`, and says
    # what its samples are.

    yields: ClassVar[str | None] = None  # what the samples are; None: anything

    def __init__(
        self,
        faults: Faults,  # that a subclass finds in its own settings
        *,
        # Samples per rank and micro-batch; a search may change the attribute between two loaders.
        batch_size: int,
        global_batch_size: int | None,  # samples of all ranks in one optimizer step; gives `batch_size`
        num_workers: int = 0,  # loader processes per rank
        seed: int = 0,  # of the order of the training samples
    ) -> None:
        super().__init__()
        faults.whole("batch_size", batch_size, what="samples per rank, a whole number")
        faults.whole(
            "global_batch_size",
            global_batch_size,
            what="samples of all ranks in one optimizer step, a whole number",
            optional=True,
        )
        faults.whole("num_workers", num_workers, least=0, what="processes per rank, a whole number")
        faults.whole("seed", seed, least=0)
        faults.raise_all()
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self._splits: dict[str, Dataset[Any]] = {}
        self._divided = False

    def train_dataloader(self) -> DataLoader[Any]:
        """Loader of the shuffled training samples, equal for all ranks in length."""
        self._divide_global_batch()
        partition = self._partition("train")
        if partition.steps == 0:
            raise ConfigurationError(
                f"one global batch ({partition.batch_size} per rank x {partition.world_size} ranks"
                f" x {partition.accumulate} accumulated = {partition.global_batch_size} samples) is larger than"
                f" the {partition.samples} training samples; make it smaller"
            )
        return self._loader("train", partition, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Loader of the validation samples, each exactly once over all ranks."""
        return self._loader("val", self._partition("val"), shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """Loader of the test samples, each exactly once over all ranks."""
        return self._loader("test", self._partition("test"), shuffle=False)

    def _divide_global_batch(self) -> None:
        # Once only: a callback that changes the batch size afterwards overrides it.
        if self.global_batch_size is not None and not self._divided:
            self.batch_size = batch_size_per_rank(self.global_batch_size, self._world_size, self._accumulate)
            self._divided = True

    def _partition(self, split: str) -> GlobalBatchPartition:
        samples = len(self._splits[split])  # type: ignore[arg-type]
        accumulate = self._accumulate if split == "train" else 1
        return GlobalBatchPartition(
            samples=samples, batch_size=self.batch_size, world_size=self._world_size, accumulate=accumulate
        )

    def _loader(self, split: str, partition: GlobalBatchPartition, *, shuffle: bool) -> DataLoader[Any]:
        dataset = self._splits[split]
        sampler = GlobalBatchSampler(
            dataset,  # type: ignore[arg-type]
            partition=partition,
            rank=self._rank,
            shuffle=shuffle,
            seed=self.seed,
        )
        collate: Callable[..., Any] | None = getattr(dataset, "collate", None)
        return DataLoader(
            dataset,
            batch_size=partition.batch_size if shuffle else partition.eval_batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=collate,
        )

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _accumulate(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1


# -- The steps of a classifier that both models share: loss, metrics over all ranks, optimizer --


class ClassifierModule(LightningModule):
    """Cross entropy and accuracy over the last dimension of the model's output."""

    # Logged: `train_loss` every step; `val_loss`, `val_acc`, `test_loss`, `test_acc` at the end of an
    # evaluation, over all samples of all ranks, each sample with the same weight however the samples are
    # divided.

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
