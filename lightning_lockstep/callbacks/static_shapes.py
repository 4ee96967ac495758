"""StaticShapes: pads batches to the same shapes, and names each batch that was compiled nevertheless."""

from __future__ import annotations

import copy
import logging
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._settings import Faults, is_number, is_whole
from lightning_lockstep._text import counted
from lightning_lockstep.callbacks.auto_batch_size import AutoBatchSize
from lightning_lockstep.callbacks.ends_with_run import EndsWithRun
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.statistics import samples_in, tensors_in
from lightning_lockstep.steps.patching import batch_size_of, replaced
from lightning_lockstep.xla.runtime import compilations_so_far

_log = logging.getLogger(__name__)

Key = str | int

# -- Batches with more samples, or longer sequences, than they came with --


def padded(batch: Any, shapes: StaticShapes, size: int = 0) -> Any:
    """Return a batch with padded sequences and ``size`` samples at least; the given batch does not change."""
    samples = samples_in(batch)

    def of_tensor(key: Any, tensor: Tensor) -> Tensor:
        if key in shapes.padding and tensor.dim() > shapes.dim:
            index = bisect_left(shapes.lengths, tensor.size(shapes.dim))
            if index < len(shapes.lengths):
                tensor = _longer(tensor, shapes.dim, shapes.lengths[index], shapes.padding[key])
        if tensor.dim() and tensor.size(0) == samples < size:
            tensor = _longer(tensor, 0, size, shapes.ignored.get(key))
        return tensor

    items = parts(batch).items()
    made = {key: apply_to_collection(value, Tensor, partial(of_tensor, key)) for key, value in items}
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        changed.update(made)
        return changed
    if isinstance(batch, (list, tuple)):
        is_named = hasattr(batch, "_fields")
        return type(batch)(*made.values()) if is_named else type(batch)(made.values())
    return made[None]


def parts(batch: Any) -> dict[Any, Any]:
    """Return the parts of a batch by key, or by position if it is a list; by ``None`` if it is neither."""
    if isinstance(batch, MutableMapping):
        return dict(batch)
    return dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else {None: batch}


def _longer(tensor: Tensor, dim: int, size: int, value: float | None) -> Tensor:
    """Return a tensor that is longer along a dimension: by a value, or by copies of its last entry."""
    shape = [*tensor.shape[:dim], size - tensor.size(dim), *tensor.shape[dim + 1 :]]
    if value is None:
        return torch.cat([tensor, tensor.narrow(dim, tensor.size(dim) - 1, 1).expand(shape)], dim)
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)


# -- What was compiled --

Shapes = tuple[tuple[int, ...], ...]


def _compiled_so_far(trainer: Trainer) -> tuple[int, float]:
    """Return how many graphs ``torch.compile`` and torch-xla have made in this process, and in what time [s]."""
    strategy: Any = trainer.strategy
    graphs, seconds = 0, 0.0
    if strategy.root_device.type == "xla":
        if hasattr(strategy, "sync"):
            strategy.sync()  # starts what is pending, so that it belongs to the batch that has called it
        graphs, seconds = compilations_so_far()
    utils = sys.modules.get("torch._dynamo.utils")  # which torch.compile imports when it is first used
    if utils is not None:
        graphs += utils.counters["stats"]["unique_graphs"]
        seconds += utils.calculate_time_spent()["total_wall_time"]
    return graphs, seconds


class LateBatch(NamedTuple):
    """A batch in which something was compiled, after the first ones of its stage."""

    stage: str
    batch_idx: int  # of the loader, from 0
    step: int  # optimizer steps made so far, this batch's included
    graphs: int
    seconds: float
    shapes: Shapes  # of the tensors of the batch
    before: Shapes  # of the stage's batch before it

    def line(self) -> str:
        compiled = f"compiled {counted(self.graphs, 'graph')} in {self.seconds:.1f} s"
        text = f"{self.stage} batch {self.batch_idx} (step {self.step}) {compiled}"
        if self.shapes == self.before:
            return f"{text}, with the shapes of the batch before it; for torch.compile, TORCH_LOGS=recompiles says why"
        now, before = (", ".join(map(str, shapes)) or "none" for shapes in (self.shapes, self.before))
        return (
            f"{text}: its shapes are {now}, those of the batch before {before}. batch_size='train' fills up smaller"
            " batches, lengths=[...] pads sequences"
        )


# -- The callback --

_BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
# The number of first batches of a stage (in training: of optimizer steps) that may compile without a warning.
_EXPECTED = 2


class StaticShapes(EndsWithRun):
    """Pads batches to the same shapes, and names each batch whose shapes were compiled after the first ones.

    Without arguments nothing is padded. A step whose batches may be filled up asks which samples are real, with
    :meth:`real_samples` or :meth:`mean`, or ``ignored`` marks them; otherwise it is refused at its first batch. What
    it logs is weighted by the number of real samples.

    Args:
        lengths: Lengths to which sequences are padded, in growing order: each to the smallest that holds it.
        pad_values: What sequences are padded with, by key of the batch (by position, if a batch is a list), such as
            ``{"input_ids": 0, "attention_mask": 0}``.
        ignored: Values that loss and metrics ignore, by key, such as ``{"labels": -100}``: sequences are padded
            with them, and added samples have them. Other tensors of an added sample are copies of the last one.
        dim: Dimension along which sequences are padded.
        batch_size: Fill up each smaller batch of training, validation and test to this many samples; ``train``: to the
            batch size of training. ``None`` adds no samples.

    Attributes:
        late: Every batch in which something was compiled after the first ones of its stage.

    Raises:
        ConfigurationError: An argument cannot be used; the message lists every error. (On every rank, in a run:
            the data or the module does not allow what was asked for.)

    Ranks: add it on every rank; each pads and watches its own batches, and nothing is sent. Under XLA pending
        operations are started at both ends of a batch, so that a compilation belongs to a known one.
    """

    # Only one step at a time runs in a process. The mask of its batch is kept here, because a batch may have no place
    # for it: (samples,) bool on the CPU, True for the real samples. None: no batch of the loader is padded.
    _mask: ClassVar[Tensor | None] = None
    _was_asked: ClassVar[bool] = False  # whether the step has asked for it

    def __init__(
        self,
        *,
        lengths: Sequence[int] = (),
        pad_values: Mapping[Key, float] | None = None,
        ignored: Mapping[Key, float] | None = None,
        dim: int = 1,
        batch_size: Literal["train"] | int | None = None,
    ) -> None:
        super().__init__()
        faults = Faults()
        are_whole = isinstance(lengths, Sequence) and all(is_whole(one) and one > 0 for one in lengths)
        are_growing = are_whole and list(lengths) == sorted(set(lengths))
        faults.check(are_growing, "lengths", lengths, "growing lengths, such as [64, 128, 256]")
        for name, given in (("pad_values", pad_values), ("ignored", ignored)):
            has_values = isinstance(given, Mapping) and all(
                isinstance(key, (str, int)) and is_number(value) for key, value in given.items()
            )
            expected = "a value for each key, such as {'labels': -100}"
            faults.check(given is None or has_values, name, given, expected)
        if bool(lengths) != bool(pad_values) and not (lengths and ignored):
            faults.add(
                f"lengths={lengths!r} with pad_values={pad_values!r}: expected both or neither: lengths to pad to, and"
                " the value that pads each tensor."
            )
        faults.whole("dim", dim, what="a dimension of the tensors")
        is_size = batch_size in ("train", None) or (is_whole(batch_size) and batch_size > 0)
        faults.check(is_size, "batch_size", batch_size, "'train', a number of samples or None")
        faults.raise_all()
        self.lengths, self.dim, self.batch_size = list(lengths), dim, batch_size
        self.pad_values, self.ignored = dict(pad_values or {}), dict(ignored or {})
        self.padding = {**self.pad_values, **self.ignored}  # of padded sequences
        self.late: list[LateBatch] = []
        self._training_size: int | None = None
        self._pads = False  # whether batches are padded now

    @staticmethod
    def real_samples(batch: Any) -> Tensor:
        """Return which samples of the current batch are real: ``(samples,)`` bool, on the device of the batch."""
        samples, tensors = samples_in(batch), tensors_in(batch)
        if not any(tensor.dim() for tensor in tensors):
            raise ConfigurationError(
                f"StaticShapes.real_samples({type(batch).__name__}): expected the batch of the step, with a tensor"
                " whose first dimension is the samples."
            )
        mask, StaticShapes._was_asked = StaticShapes._mask, True
        device = tensors[0].device
        if mask is None:
            return torch.ones(samples, dtype=torch.bool, device=device)
        if mask.size(0) != samples:
            raise ConfigurationError(
                f"StaticShapes.real_samples of a batch of {samples} samples: expected the whole batch of the step, of"
                f" {mask.size(0)}. Take the mask of the whole batch, and divide it like the batch."
            )
        return mask.to(device, non_blocking=True)

    @staticmethod
    def mean(values: Tensor, batch: Any) -> Tensor:
        """Return the mean of ``values``, ``(samples, ...)``, over the real samples of the current batch."""
        mask = StaticShapes.real_samples(batch)
        if not values.dim() or values.size(0) != mask.size(0):
            raise ConfigurationError(
                f"StaticShapes.mean of values of shape {tuple(values.shape)}: expected {mask.size(0)} rows, one for"
                ' each sample. A loss function gives them with reduction="none".'
            )
        shaped = mask.view(-1, *[1] * (values.dim() - 1))
        # The mean over all is scaled, because a sum of 16-bit values would overflow.
        return torch.where(shaped, values, 0).mean() * (mask.size(0) / mask.sum())

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start a new record; refuse what splits batches. Ranks: any, alone."""
        self.at_end.close()
        self.late = []
        self._sizes: Counter[tuple[str, int]] = Counter()  # largest batch of each loader, by stage
        self._batches: Counter[str] = Counter()  # by stage
        self._before: dict[str, Shapes] = {}  # of the last batch, by stage
        if stage != "fit":
            return  # a test after a fit keeps the size of its batches
        self._training_size = None
        callbacks = getattr(trainer, "callbacks", [])
        splits = any(isinstance(one, AutoBatchSize) and one.on_oom == "split" for one in callbacks)
        if splits and self.batch_size is not None:
            raise ConfigurationError(
                f"StaticShapes(batch_size={self.batch_size!r}) with AutoBatchSize(on_oom='split'): expected one of"
                " them, because a batch that is split is not the one that was filled up."
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pad batches from here on, but not those of a search for a batch size before. Ranks: any, alone."""
        self._begin_padding(trainer)

    on_sanity_check_start = on_test_start = on_validation_start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pad batches from here on; raise if samples cannot be added. Ranks: all."""
        # The start of an epoch would be too late: Lightning calls no hook there if a run resumes in the middle of one.
        self._begin_padding(trainer)
        loaders = self._checked_loaders(trainer, "training")
        self._training_size = batch_size_of(loaders[0])
        modules = pl_module.named_modules()
        norms = [name for name, one in modules if isinstance(one, _BATCH_NORMS) and one.training]
        if norms and self.batch_size is not None and not getattr(loaders[0], "drop_last", False):
            raise ConfigurationError(
                f"StaticShapes(batch_size={self.batch_size!r}) with batch normalisation ({', '.join(norms[:3])}):"
                " expected a model without it, because its statistics would count added samples. Give the training"
                " DataLoader drop_last=True instead."
            )

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Leave out what was compiled before the batch, and weight what is logged by the real samples."""
        self._compiled = _compiled_so_far(trainer)
        results: Any = trainer._results
        if StaticShapes._mask is not None and results is not None:
            # The weight of what is logged without a batch_size.
            results.batch_size = int(StaticShapes._mask.sum())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Refuse a training step that does not ask which samples are real. Ranks: all, at their first batch."""
        self._refuse_if_not_asked("training")

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Say what this batch has compiled; in an evaluation refuse a step that does not ask. Ranks: any, alone."""
        stage = _stage_of(trainer)
        if stage != "training":
            self._refuse_if_not_asked(stage)
        shapes = tuple(tuple(one.shape) for one in tensors_in(batch))
        accumulated = trainer.accumulate_grad_batches if stage == "training" else 1
        self._batches[stage] += 1
        (graphs, seconds), before = _compiled_so_far(trainer), self._compiled
        if graphs > before[0] and self._batches[stage] > _EXPECTED * accumulated:
            cost = graphs - before[0], seconds - before[1]
            late = LateBatch(stage, batch_idx, trainer.global_step, *cost, shapes, self._before[stage])
            self.late.append(late)
            who = "" if trainer.is_global_zero else f" rank {trainer.global_rank}:"
            _log.warning("StaticShapes:%s %s", who, late.line())
        self._before[stage] = shapes

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def _begin_padding(self, trainer: Trainer) -> None:
        if self._pads:
            return
        strategy: Any = trainer.strategy
        move = strategy.batch_to_device

        def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            shaped = self._shaped(trainer, batch, dataloader_idx)
            return move(shaped, device=device, dataloader_idx=dataloader_idx)

        self.at_end.callback(setattr, StaticShapes, "_mask", None)
        self.at_end.enter_context(replaced(self, _pads=True))
        self.at_end.enter_context(replaced(strategy, batch_to_device=batch_to_device))

    def _checked_loaders(self, trainer: Trainer, stage: str) -> list[Any]:
        loop: Any = trainer._active_loop
        combined = loop._combined_loader
        if self.batch_size is not None and len(combined.flattened) > 1 and combined._mode != "sequential":
            raise ConfigurationError(
                f"StaticShapes(batch_size={self.batch_size!r}) with several loaders of {stage} at once: expected one,"
                " because there is one mask for a batch, and its parts have different numbers of samples."
            )
        return list(combined.flattened)

    def _refuse_if_not_asked(self, stage: str) -> None:
        if StaticShapes._mask is None or StaticShapes._was_asked or self.ignored:
            return
        drop = ", or drop_last=True in its DataLoader" if stage == "training" else ""
        raise ConfigurationError(
            f"StaticShapes(batch_size={self.batch_size!r}): expected {stage}_step to ask which samples are real,"
            " because the added ones would count in its loss and metrics. Use StaticShapes.mean(losses, batch) instead"
            " of the mean, or StaticShapes.real_samples(batch). Or give ignored={'labels': -100}, if loss and"
            f" metrics ignore that value{drop}."
        )

    def _shaped(self, trainer: Trainer, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch padded to the shapes of its stage, and record how many of its samples are real."""
        stage = _stage_of(trainer)
        StaticShapes._mask, StaticShapes._was_asked = None, False
        missing = [key for key in self.padding if key not in parts(batch)]
        if missing and stage == "training":  # evaluation may have no labels
            raise ConfigurationError(
                f"StaticShapes has values for {', '.join(map(repr, missing))}: expected keys of the batches"
                f" (positions, if a batch is a list). A training batch is a {type(batch).__name__} with"
                f" {', '.join(map(repr, parts(batch)))}."
            )
        real = samples_in(batch)
        if self.batch_size is None or not real or not any(one.dim() for one in tensors_in(batch)):
            return padded(batch, self) if self.lengths else batch
        loader = self._checked_loaders(trainer, stage)[dataloader_idx]
        key = stage, dataloader_idx
        wanted = self._training_size if self.batch_size == "train" else self.batch_size
        self._sizes[key] = size = max(wanted or 0, batch_size_of(loader) or 0, real, self._sizes[key])
        if size > real or not getattr(loader, "drop_last", False):
            StaticShapes._mask = torch.arange(size) < real
        return padded(batch, self, size) if self.lengths or size > real else batch


def _stage_of(trainer: Trainer) -> str:
    if trainer.predicting or trainer.testing:
        return "predict" if trainer.predicting else "test"
    return "training" if trainer.training else "validation"
