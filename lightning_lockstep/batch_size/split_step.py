"""A batch cut into micro-batches, and how their results and logged values are combined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_lockstep._lightning import LightningModule
from lightning_lockstep.numerics.statistics import output_values


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor found; 1 without one."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.ndim), 1)


def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into that many micro-batches (one per sample at most), equal but for one sample."""
    # Tensors with one entry for each sample are cut, and so are lists and tuples of that length without tensors;
    # everything else goes into each part. Nothing is copied.
    samples = samples_in(batch)
    bounds = [samples * part // parts for part in range(parts + 1)]
    return [_cut(batch, samples, start, end) for start, end in pairwise(bounds)]


def _cut(batch: Any, samples: int, start: int, end: int) -> Any:
    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[start:end] if value.ndim and value.shape[0] == samples else value
        if not tensors_in(value):
            return value[start:end] if len(value) == samples else value
        items = [_cut(item, samples, start, end) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    return _with_each(batch, (Tensor, list, tuple), cut)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a batch of any structure, in its order."""
    return [part for _, part in output_values(value) if isinstance(part, Tensor)]


def _with_each(value: Any, kinds: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function as ``apply_to_collection`` does, also in a batch that is a frozen dataclass."""
    settings = getattr(type(value), "__dataclass_params__", None)
    if settings is None or not settings.frozen or isinstance(value, kinds):
        return apply_to_collection(value, kinds, function)
    parts = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    return replace(value, **{name: _with_each(part, kinds, function) for name, part in parts.items()})


def merged_extra(extras: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Return what a training step returned in addition to the loss, as one step on the whole batch would have."""
    # Single numbers are averaged with the weights, tensors with one entry per sample are joined, and of anything else
    # the first is taken.
    merged: dict[str, Any] = {}
    for key, first in extras[0].items():
        values = [extra[key] for extra in extras if key in extra]
        if isinstance(first, Tensor) and first.ndim and len(values) == len(extras):
            merged[key] = torch.cat(values) if all(v.shape[1:] == first.shape[1:] for v in values) else first
        else:
            merged[key] = _weighted_mean(values, weights)
    return merged


def _weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean of numbers or single-element tensors; of anything else, the first."""
    if not all(_is_number(value) for value in values) or len(values) != len(weights):
        return values[0]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class _Call:
    """One call of ``self.log`` in a part."""

    value: Any
    of_metric: Any  # the value of a metric for this part alone
    options: Mapping[str, Any]
    weight: float  # of the part
    samples: int  # of the part


class LogRecord:
    """Replaces ``LightningModule.log`` while the parts of a step run, then logs what the whole batch would have."""

    # Each value is logged once, because one with ``sync_dist=True`` is a collective, which the other ranks call once.

    def __init__(self, log: Callable[..., None] | None = None) -> None:
        self._log = log  # it is called at once, too
        # The key is the name, and how often the part has logged that name before; the order is that of the calls.
        self._calls: dict[tuple[str, int], list[_Call]] = {}
        self._in_part: dict[str, int] = {}
        self._part = (1.0, 1)  # weight and samples of the part that runs

    def begin_part(self, weight: float = 1.0, samples: int = 1) -> None:
        self._in_part, self._part = {}, (weight, samples)

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._log is not None:
            self._log(name, value, *args, **kwargs)
        if type(value) is Tensor:
            value = value.detach() if value.is_floating_point() else value.float()  # as Lightning does
        # The value for this part alone.
        of_metric = value._forward_cache if isinstance(value, Metric) else None
        options = {**dict(zip(_LOG_OPTIONS, args, strict=False)), **kwargs}
        key = name, self._in_part.get(name, 0)
        self._in_part[name] = key[1] + 1
        self._calls.setdefault(key, []).append(_Call(value, of_metric, options, *self._part))

    def metrics(self) -> list[Metric]:
        """Return the metrics that were logged, which were updated with the batch."""
        found = (call.value for calls in self._calls.values() for call in calls)
        return [value for value in found if isinstance(value, Metric)]

    def replay(self, log: Callable[..., None], *, without: LogRecord | None = None) -> None:
        """Log each value once, for all parts together; values that ``without`` has were logged already."""
        for (name, number), calls in self._calls.items():
            if without is None or (name, number) not in without._calls:
                value, options = _together(calls)
                log(name, value, **options)


_LOG_OPTIONS = tuple(signature(LightningModule.log).parameters)[3:]  # what follows self, name and value


def _together(calls: Sequence[_Call]) -> tuple[Any, dict[str, Any]]:
    """Return the value and the options with which one batch would have been logged."""
    options, weights = dict(calls[0].options), [call.weight for call in calls]
    sizes: list[Any] = [call.options.get("batch_size") for call in calls]
    if all(size is not None for size in sizes):  # else Lightning takes that of the whole batch
        samples = [call.samples for call in calls]
        # A size that is the same in each part, and not the part's number of samples, does not come from the batch.
        fixed = sizes != samples and set(sizes) in ({1}, {sum(samples)})
        options["batch_size"] = sizes[0] if fixed else sum(sizes)
        weights = weights if fixed or not sum(sizes) else sizes
    first, values = calls[0].value, [call.value for call in calls]
    if isinstance(first, Metric):  # it has all parts, but its value for the batch is that of the last part
        if all(_is_number(call.of_metric) for call in calls):
            first._forward_cache = _weighted_mean([call.of_metric for call in calls], weights)
        return first, options
    reduction = getattr(options.get("reduce_fx"), "__name__", options.get("reduce_fx"))
    reductions: dict[Any, Callable[[Any], Any]] = {"sum": sum, "min": min, "max": max}
    if reduction in reductions and all(_is_number(value) for value in values):
        return reductions[reduction](values), options
    return _weighted_mean(values, weights), options
