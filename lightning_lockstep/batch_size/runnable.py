"""The largest batch size with which a run can go on: what loaders and limits leave of an epoch.

Memory is another matter. A loader that cannot be made with a size, an epoch without a full batch under
``drop_last``, or less than one batch under ``limit_train_batches=0.1`` would end the run after the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_lockstep._lightning import CombinedLoader, Trainer
from lightning_lockstep._lightning.internals import data_source
from lightning_lockstep._text import counted
from lightning_lockstep.batch_size.loaders import BatchLoaders, samples_of_rank
from lightning_lockstep.batch_size.refused import SearchRefusedError
from lightning_lockstep.distributed import Communicator

__all__ = ["batches_fault", "largest_runnable", "largest_to_try", "why_not_runnable"]

_LIMITS = {"fit": "limit_train_batches", "validate": "limit_val_batches"}


def largest_to_try(
    trainer: Trainer,
    place: BatchLoaders,
    *,
    max_val: int,
    within_shard: bool,  # no more than the data that every rank gets
    global_batch: int | None,  # samples of all ranks in an optimizer step
    communicator: Communicator,
) -> tuple[int, str]:
    """Return the largest size that a search may try, and why none above can be run (empty: one could)."""
    most = max_val
    if global_batch is not None:
        most = min(most, math.ceil(global_batch / communicator.world_size))
    if within_shard:
        most = min(most, int(communicator.all_reduce(torch.tensor(place.samples), "min")))
    with place.attributes.former_afterwards():
        return largest_runnable(
            lambda size: why_not_runnable(trainer, place, size), most=most, communicator=communicator
        )


def largest_runnable(
    why_not: Callable[[int], str], *, most: int, communicator: Communicator
) -> tuple[int, str]:
    """Return the largest size that every rank can run, and why none above it (empty: ``most`` can be run)."""

    def agreed(size: int) -> str:
        reason = why_not(size)
        reasons = communicator.agree(bool(reason), reason).reasons
        return next((f"{text} (rank {rank})" for rank, text in sorted(reasons.items())), "")

    reason = agreed(most)
    if not reason:
        return most, ""
    # Where a size can be run, all below it can.
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        text = agreed(middle)
        if text:
            high, reason = middle, text
        else:
            low = middle
    if not low:
        raise SearchRefusedError(f"no batch size can be run here, not even 1: {reason}")
    return low, reason


def why_not_runnable(trainer: Trainer, place: BatchLoaders, size: int) -> str:
    """Return why a run with that size could not begin on this rank, or nothing."""
    fn = trainer.state.fn.value if trainer.state.fn is not None else "fit"
    try:
        loaders = place.made_with(size)
        fault = _fault_of(trainer, loaders, _LIMITS.get(fn, f"limit_{fn}_batches"))
        if not fault and fn == "fit":
            fault = _fault_of_validation(trainer, place, [_batches(trainer, loader) for loader in loaders])
        return fault
    except Exception as error:  # a loader's hook refuses the size in its own way
        return str(error) or type(error).__name__


def batches_fault(length: int, limit: int | float, name: str) -> str:
    """Return why a loop cannot go over a loader of ``length`` batches, or nothing."""
    if limit == 0:
        return ""
    if length == 0:
        return "drop_last=True leaves no full batch in an epoch"
    if isinstance(limit, float) and int(length * limit) == 0:
        return f"{name}={limit} of {counted(length, 'batch', 'batches')} is less than one"
    return ""


def _fault_of(trainer: Trainer, loaders: Sequence[DataLoader[Any]], name: str) -> str:
    limit = getattr(trainer, name)
    return next(filter(None, (batches_fault(_batches(trainer, each), limit, name) for each in loaders)), "")


def _batches(trainer: Trainer, loader: DataLoader[Any]) -> int:
    samples, size = samples_of_rank(trainer, loader), int(loader.batch_size or 1)
    return samples // size if loader.drop_last else -(-samples // size)


def _fault_of_validation(trainer: Trainer, place: BatchLoaders, lengths: Sequence[int]) -> str:
    """What Lightning would say of the validation inside a fit, whose loaders may be made with the same attribute."""
    limit, interval = trainer.limit_val_batches, trainer.val_check_interval
    source = data_source(trainer.fit_loop.epoch_loop.val_loop)
    if limit == 0 or not source.is_defined():
        return ""
    taken = trainer.limit_train_batches
    batches = min(min(each, taken) if isinstance(taken, int) else int(each * taken) for each in lengths)
    if isinstance(interval, int) and interval > batches and trainer.check_val_every_n_epoch is not None:
        return f"val_check_interval={interval} is more than the {counted(batches, 'batch', 'batches')} of an epoch"
    if place.in_attribute and source.is_module() and isinstance(limit, float) and limit < 1:
        loaders = [each for each in CombinedLoader(source.dataloader()).flattened if _has_length(each)]
        return _fault_of(trainer, [each for each in loaders if _batches(trainer, each)], "limit_val_batches")
    return ""


def _has_length(loader: object) -> bool:
    return isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")
