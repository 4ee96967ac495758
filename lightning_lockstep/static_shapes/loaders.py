"""Loaders whose batches have all the same size, where the loader can give them."""

from __future__ import annotations

import copy
from collections.abc import Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_lockstep._doors.torch_internals import forget_iterator
from lightning_lockstep.batch_size.loaders import with_batch_size

__all__ = ["evaluation_loader", "fault_of_dropping", "loader_that_drops", "size_of"]


def size_of(loader: Any) -> int | None:
    """Return how many samples the batches of a loader have, or ``None`` where it does not say."""
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def fault_of_dropping(loader: Any) -> str | None:
    """Return why a loader cannot leave out its last batch, or ``None`` if it can."""
    if not isinstance(loader, DataLoader):
        return (
            f"last_batch='drop' with a {type(loader).__name__}: expected a DataLoader, which can leave it out"
        )
    if not _is_plain(loader):
        kind = type(loader.batch_sampler).__name__
        return (
            f"last_batch='drop' with a batch sampler of its own ({kind}): expected one of torch, which can leave it"
            " out. Let your sampler do it, and give last_batch='keep'"
        )
    if not isinstance(loader.dataset, IterableDataset) and _samples_of(loader) in range(
        loader.batch_size or 0
    ):
        return (
            f"last_batch='drop' with fewer samples than one batch of {loader.batch_size}: expected at least one batch."
            " Make the batch smaller"
        )
    return None


def loader_that_drops(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader like ``loader`` that leaves out a last batch that is not full."""
    if loader.drop_last:
        return loader
    made = copy.copy(loader)
    sampler: Any = loader.batch_sampler
    # The class forbids to change these after its constructor, which a subclass may have changed.
    vars(made)["batch_sampler"] = BatchSampler(sampler.sampler, sampler.batch_size, drop_last=True)
    vars(made)["drop_last"] = True
    forget_iterator(made)
    return made


def evaluation_loader(loader: Any, size: int) -> Any:
    """Return a loader of the same samples in batches of ``size``, or ``None`` where that cannot be had.

    One that leaves out its last batch would leave out other samples, or all of them.
    """
    if not isinstance(loader, DataLoader) or not _is_plain(loader):
        return None
    if isinstance(loader.dataset, IterableDataset) or _samples_of(loader) is None or loader.drop_last:
        return None
    return with_batch_size(loader, size)


def _samples_of(loader: DataLoader[Any]) -> int | None:
    return len(loader.sampler) if isinstance(loader.sampler, Sized) else None


def _is_plain(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler
