"""A batch that does not fit during a run is run again in micro-batches under the same optimizer step.

Only the rank that ran out of memory does this, and DDP does not see its micro-batches. Then DDP is made to send the
gradients that the other ranks still wait for (see :mod:`lightning_lockstep.distributed.ddp_reducer`). They see an
ordinary, slower step. If single samples do not fit either, the rank raises, as it would without this. Nothing more is
sent for a step that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_lockstep._lightning import Closure, ClosureResult, LightningModule, Trainer
from lightning_lockstep._text import say
from lightning_lockstep.batch_size.memory import Failure, attempt, is_out_of_memory, release_memory
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.ddp_reducer import (
    GradientMarks,
    ddp_of,
    deliver_gradients,
    why_not_resumable,
)
from lightning_lockstep.errors import BatchSizeError, CollectiveError, RankFailedError
from lightning_lockstep.numerics.statistics import samples_in, tensors_in
from lightning_lockstep.steps.isolated_step import gradients_apart, on_plain_module
from lightning_lockstep.steps.patching import do_nothing, put_in_place, replaced
from lightning_lockstep.steps.snapshot import BufferCopies, ModuleAttributes, Part, restored

# -- A batch cut into micro-batches, and how their results and logged values are combined --


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

    return apply_to_collection(batch, (Tensor, list, tuple), cut)


def merged_extra(extras: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Return what a training step returned in addition to the loss, as one step on the whole batch would have."""
    # Single numbers are averaged with the weights, tensors with dimensions are joined along the first, and of
    # anything else the first part's is taken.
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


class _Call(NamedTuple):
    """One call of ``self.log``."""

    value: Any
    of_metric: Any  # if a metric was logged: its value for this step, or part of a step, alone
    options: Mapping[str, Any]


class LogRecord:
    """Replaces ``LightningModule.log`` while a step, or a part of one, runs."""

    def __init__(self, log: Callable[..., None] = do_nothing, weight: float = 1.0, samples: int = 1) -> None:
        # `log` is also called at once; `weight` and `samples` are those of the part.
        self._log, self.weight, self.samples = log, weight, samples
        # The key is the name, and how often that name was logged before; the order is that of the calls.
        self.calls: dict[tuple[str, int], _Call] = {}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._log(name, value, *args, **kwargs)
        if type(value) is Tensor:
            value = value.detach() if value.is_floating_point() else value.float()  # as Lightning does
        of_metric = value._forward_cache if isinstance(value, Metric) else None
        options = {**dict(zip(_LOG_OPTIONS, args, strict=False)), **kwargs}
        self.calls[name, sum(name == known for known, _ in self.calls)] = _Call(value, of_metric, options)

    def metrics(self) -> list[Metric]:
        """Return the metrics that were logged, which were updated with the batch."""
        return [call.value for call in self.calls.values() if isinstance(call.value, Metric)]


_LOG_OPTIONS = tuple(signature(LightningModule.log).parameters)[3:]  # what follows self, name and value


def log_together(parts: Sequence[LogRecord], log: Callable[..., None], *, without: LogRecord) -> None:
    """Log each value of several parts as the whole batch would have, but for those that ``without`` has logged."""
    # Once each, because one with ``sync_dist=True`` is a collective, which the other ranks call once.
    for key in dict.fromkeys(key for part in parts for key in part.calls if key not in without.calls):
        value, options = _together(key, [part for part in parts if key in part.calls])
        log(key[0], value, **options)


def _together(key: tuple[str, int], parts: Sequence[LogRecord]) -> tuple[Any, dict[str, Any]]:
    """Return the value and the options with which one batch would have been logged."""
    calls, weights = [part.calls[key] for part in parts], [part.weight for part in parts]
    first, options, values = calls[0].value, dict(calls[0].options), [call.value for call in calls]
    sizes: list[Any] = [call.options.get("batch_size") for call in calls]
    if None not in sizes:  # else Lightning takes that of the whole batch
        samples = [part.samples for part in parts]
        # If all are 1, or all the size of the whole batch, it is a constant of the program, not read from the part.
        fixed = sizes != samples and set(sizes) in ({1}, {sum(samples)})
        options["batch_size"] = sizes[0] if fixed else sum(sizes)
        weights = weights if fixed or not sum(sizes) else sizes
    if isinstance(first, Metric):  # it has all parts, but its value for the batch is that of the last part
        if all(_is_number(call.of_metric) for call in calls):
            first._forward_cache = _weighted_mean([call.of_metric for call in calls], weights)
        return first, options
    reduction = getattr(options.get("reduce_fx"), "__name__", options.get("reduce_fx"))
    reductions: dict[Any, Callable[[Any], Any]] = {"sum": sum, "min": min, "max": max}
    if reduction in reductions and all(_is_number(value) for value in values):
        return reductions[reduction](values), options
    return _weighted_mean(values, weights), options


# -- The steps of a fit --


class BatchSplitting:
    """Lets the training steps of a fit survive running out of memory; all ranks make it together."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        loss_reduction: Literal["mean", "sum"],  # how the training step's loss adds up over samples
    ) -> None:
        if reason := _why_not_here(trainer, module):
            raise BatchSizeError(f"on_oom='split' is not possible here: {reason}")
        self.trainer, self.module, self.loss_reduction = trainer, module, loss_reduction
        self.rank, self.recovered = current_communicator().rank, 0  # batches of this rank that were split
        self._epoch, self._trained = -1, list[nn.Parameter]()
        # Lightning makes the closure of each batch by this method.
        self.loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self.close = put_in_place(self.loop, "_make_closure", partial(_Step, self))
        if (weights := getattr(trainer.strategy, "weights", None)) is not None:
            weights.splits = True

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that get gradients; an epoch, or a resume, may freeze others."""
        if self.trainer.current_epoch != self._epoch:
            self._epoch = self.trainer.current_epoch
            self._trained = [p for p in self.module.parameters() if p.requires_grad]
        return self._trained

    @property
    def where(self) -> str:
        return f"{self.trainer.fit_loop.epoch_loop.batch_idx} of epoch {self.trainer.current_epoch}"

    def report_split(self, text: str) -> None:
        self.recovered += 1
        # The first three, then the 10th, 30th, 100th and so on: every batch may be split from some point on.
        if self.recovered <= 3 or str(self.recovered).strip("0") in ("1", "3"):
            say(f"AutoBatchSize: rank {self.rank} {text} ({self.recovered} so far)")


def _why_not_here(trainer: Trainer, module: LightningModule) -> str:
    """Return why a step of this run cannot be made in parts, the same on all ranks; empty if it can."""
    strategy: Any = trainer.strategy
    if getattr(strategy, "sample_numbers", None) is not None:
        return "with random_numbers='of_sample' or batch_norm='of_batch' its parts would give other results"
    if getattr(getattr(strategy, "settings", None), "uneven_inputs", "") == "join":
        return "with uneven_inputs='join' other ranks may wait in a step for this rank's count of samples"
    if not module.automatic_optimization:
        return "the module uses manual optimization, so this package does not control its optimizer steps"
    return why_not_resumable(strategy.model)


class _Step(Closure):
    """Forward and backward of one batch, and again in parts if memory runs out."""

    # A reference cycle would keep every batch alive until the next garbage collection, so this is not in one.

    def __init__(self, splitting: BatchSplitting, kwargs: Any, optimizer: Any, batch_idx: int) -> None:
        # kwargs: of training_step, the batch first.
        loop = splitting.loop
        backward: Callable[[Tensor], None] | None = loop._make_backward_fn(optimizer)
        # The gradients when the backward of the whole batch began; a list, because `_marked` may not refer to this
        # object, and empty if it has not begun.
        self._marks: list[GradientMarks] = []
        marked = None if backward is None else partial(_marked, self._marks, splitting.trained, backward)
        self._zero_grad = loop._make_zero_grad_fn(batch_idx, optimizer)
        super().__init__(loop._make_step_fn(kwargs), marked, self._zero_grad)
        self._splitting, self._kwargs, self._backward = splitting, kwargs, backward

    def closure(self, *args: Any, **kwargs: Any) -> Any:
        # A repetition must not log again. Because this runs around every step, it uses no context manager.
        module = self._splitting.module
        logged = LogRecord(module.log)
        undo = put_in_place(module, "log", logged)
        try:
            result = super().closure(*args, **kwargs)
            self._marks.clear()  # they refer to gradients
            return result
        except Exception as error:
            # The error of another rank may quote that memory ran out, but it ran out there.
            if isinstance(error, (RankFailedError, CollectiveError)) or not is_out_of_memory(error):
                raise
            failure = Failure.of(error).summary[:200]
        finally:
            undo()
        # This is outside the except clause, so that the memory of the failed step is free again.
        return self._again(failure, logged)

    def _again(self, failure: str, logged: LogRecord) -> Any:
        """Run the batch in more and more parts until they fit; send the gradients that other ranks wait for."""
        splitting, began = self._splitting, bool(self._marks)
        missing = self._marks.pop().missing(splitting.trained) if began else splitting.trained
        if not began and self._zero_grad is not None:
            self._zero_grad()  # as the step on the whole batch would have done
        batch = next(iter(self._kwargs.values()))
        samples, parts, done = samples_in(batch), 1, None
        while done is None and parts < samples:
            release_memory()
            parts = min(2 * parts, samples)
            done = self._in_parts(split(batch, parts), missing, logged, began=began)
        if done is None:
            raise BatchSizeError(
                f"rank {splitting.rank} ran out of memory in batch {splitting.where}, and single samples do not fit"
                f" either ({samples} samples in the batch): {failure}"
            )
        splitting.report_split(f"split batch {splitting.where} into {parts} micro-batches: {failure}")
        result, gradients = done
        trainer = splitting.trainer
        deliver_gradients(ddp_of(trainer.strategy.model), gradients, backward_began=began)
        if result.closure_loss is not None:
            trainer.precision_plugin.post_backward(result.closure_loss, splitting.module)
        return result

    def _in_parts(
        self, parts: Sequence[Any], missing: Sequence[nn.Parameter], logged: LogRecord, *, began: bool
    ) -> tuple[Any, dict[nn.Parameter, Tensor | None]] | None:
        """Return what the whole batch would have, and its missing gradients; ``None`` if memory runs out."""
        # The parts run on the module itself, without the gradient hooks of the wrapper and the program.
        module, trained = self._splitting.module, self._splitting.trained
        logs, results = list[LogRecord](), list[Any]()
        # If the forward of the whole batch had ended, the parts must not change again what it has left: running
        # statistics, metrics, lists. If it had only begun, they must not change the metrics that it has logged.
        restored_parts: list[Part] = [ModuleAttributes(metric) for metric in logged.metrics()]
        if began:
            restored_parts = [BufferCopies(module), ModuleAttributes(module)]
        with gradients_apart(trained, hooks=False), restored(*restored_parts):
            for parameter in set(trained).difference(missing):
                parameter.requires_grad_(False)  # its gradient has arrived already
            failed = attempt(lambda: results.append(self._run_parts(parts, logs)))
            gradients = {parameter: parameter.grad for parameter in missing}
        if failed is None:
            if not began:  # else the forward of the whole batch had ended, and has logged everything
                with replaced(module, _current_fx_name="training_step"):
                    log_together(logs, module.log, without=logged)
            return results[0], gradients
        if not failed.out_of_memory:
            raise failed.error or BatchSizeError(failed.summary)
        return None

    def _run_parts(self, parts: Sequence[Any], logs: list[LogRecord]) -> Any:
        """Forward and backward of each micro-batch, whose gradients add up; ``logs`` gets what each logs."""
        trainer, module = self._splitting.trainer, self._splitting.module
        strategy, precision = trainer.strategy, trainer.precision_plugin
        refused = dict.fromkeys(("all_gather", "reduce", "broadcast"), _refuse_collective)
        weights = getattr(strategy, "weights", None)
        sizes = [samples_in(part) for part in parts]
        shares = [size / sum(sizes) for size in sizes]
        name, total, extras = next(iter(self._kwargs)), None, []
        with (
            torch.enable_grad(),
            on_plain_module(strategy),
            replaced(strategy, **refused),
            replaced(weights, in_parts=True) if weights is not None else nullcontext(),
            # The hooks in it are for the gradients of the whole batch.
            replaced(precision, post_backward=lambda tensor, module: tensor.detach()),
        ):
            for part, size, share in zip(parts, sizes, shares, strict=True):
                logs.append(LogRecord(weight=share, samples=size))
                with replaced(module, log=logs[-1]):
                    result = self._splitting.loop._make_step_fn({**self._kwargs, name: part})()
                if result.closure_loss is None:
                    continue
                loss = result.closure_loss * (share if self._splitting.loss_reduction == "mean" else 1.0)
                if self._backward is not None:
                    self._backward(loss)
                total = loss.detach() if total is None else total + loss.detach()
                extras.append(result.extra)
                del result, loss
        extra = merged_extra(extras, shares) if extras and len(extras) == len(shares) else {}
        return ClosureResult(closure_loss=total, extra=extra)


def _marked(
    marks: list[GradientMarks],
    trained: Sequence[nn.Parameter],
    backward: Callable[[Tensor], None],
    loss: Tensor,
) -> None:
    """Note which gradients there are, and run the backward of a whole batch."""
    marks[:] = [GradientMarks(trained)]
    backward(loss)


def _refuse_collective(*args: Any, **kwargs: Any) -> None:
    raise BatchSizeError(
        "training_step communicates (all_gather, reduce or broadcast), so its batch cannot be split on one rank,"
        " because the other ranks communicate once. Use a smaller batch."
    )
