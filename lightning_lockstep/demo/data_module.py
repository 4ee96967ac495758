"""What the two data modules share: the batch size, checked and divided, and the loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch.utils.data import DataLoader, Dataset

from lightning_lockstep._lightning import LightningDataModule
from lightning_lockstep.demo.global_batch_sampler import (
    GlobalBatchPartition,
    GlobalBatchSampler,
    batch_size_per_rank,
)
from lightning_lockstep.errors import ConfigurationError


def require(*checks: tuple[bool, str]) -> None:
    """Raise one `ConfigurationError` that lists the message of every check that is false."""
    faults = [message for passed, message in checks if not passed]
    if faults:
        raise ConfigurationError(faults)


def is_count(value: Any, *, least: int = 1) -> bool:
    """Whether `value` is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class GlobalBatchDataModule(LightningDataModule):
    """A data module that deals the same global batches to any number of ranks.

    A subclass fills `self._splits` with the data sets `"train"`, `"val"` and `"test"` in `setup`, and says what
    its samples are (`lightning_lockstep.demo.samples`).

    Attributes:
        yields: What the samples are; `None` leaves it open.

    Args:
        own_checks: What a subclass asks of its own settings, for `require`.
        batch_size: Samples per rank and micro-batch. The attribute of the same name may be changed between
            two loaders (that is how a search for the largest batch size works).
        global_batch_size: Samples of all ranks in one optimizer step; when given, `batch_size` is derived
            from it.
        num_workers: Loader processes per rank.
        seed: Seed of the order of the training samples.

    Raises:
        ConfigurationError: A setting is out of range; all faults are listed, the subclass's first.

    Ranks:
        Built on every rank alike; nothing is communicated.
    """

    yields: ClassVar[str | None] = None

    def __init__(
        self,
        *own_checks: tuple[bool, str],
        batch_size: int,
        global_batch_size: int | None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require(
            *own_checks,
            (
                is_count(batch_size),
                f"batch_size must be a whole number from 1 (samples per rank), given {batch_size!r}",
            ),
            (
                global_batch_size is None or is_count(global_batch_size),
                "global_batch_size must be null or a whole number from 1 (samples of all ranks in one "
                f"optimizer step), given {global_batch_size!r}",
            ),
            (
                is_count(num_workers, least=0),
                f"num_workers must be a whole number from 0 (processes per rank), given {num_workers!r}",
            ),
            (is_count(seed, least=0), f"seed must be a whole number from 0, given {seed!r}"),
        )
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
        # Once only: a callback that changes the batch size afterwards has the last word.
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
