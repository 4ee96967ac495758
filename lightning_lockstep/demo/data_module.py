"""What the two data modules share: the batch size, checked and divided, and the loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch.utils.data import DataLoader, Dataset

from lightning_lockstep._lightning import LightningDataModule
from lightning_lockstep._settings import Faults
from lightning_lockstep.demo.global_batch_sampler import (
    GlobalBatchPartition,
    GlobalBatchSampler,
    batch_size_per_rank,
)
from lightning_lockstep.errors import ConfigurationError

# What the samples of a data module are, in words (`yields`): a model fits it whose `takes` is the same.
# `lockstep-train` compares the two before it starts any rank; a class without one is not compared.
LABELLED_IMAGES = "images with a class each"
BYTE_WINDOWS = "windows of bytes"


class GlobalBatchDataModule(LightningDataModule):
    """A data module whose global batches are the same on any number of ranks.

    A subclass fills `self._splits` with the data sets `"train"`, `"val"` and `"test"` in `setup`, and says what
    its samples are.
    """

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
