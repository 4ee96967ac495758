"""One optimizer step made of parts of a batch that does not fit."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_lockstep._doors.lightning import (
    Closure,
    ClosureResult,
    LightningModule,
    Trainer,
    _AutomaticOptimization,
)
from lightning_lockstep._doors.lightning_internals import logs_as
from lightning_lockstep.batch_size.memory import Failure, attempt, is_out_of_memory
from lightning_lockstep.distributed.c10d_operators import GradientMarks
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.isolated import gradients_apart, on_plain_module
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.steps.snapshot import BufferCopies, ModuleAttributes, Snapshot

# -- The training step that survives running out of memory: where it is caught, and how far it had come --

SPLIT_ON_PURPOSE = "this batch is as large as one that did not fit"


LogCall = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


class TooLargeError(MemoryError):
    """Raised in place of a step that is known not to fit."""


class StepRecovery(Protocol):
    """What a guarded step asks when it begins, ends or runs out of memory."""

    trainable: list[nn.Parameter]

    def prepare(self, call: GuardedClosure) -> list[Callable[[], None]]:
        """Begin a step; returns what to call at the end of the attempt."""
        ...

    def succeeded(self, call: GuardedClosure) -> None:
        """End a step that fitted."""
        ...

    def recover(self, call: GuardedClosure, failure: str) -> Any:
        """Return the result of a step that did not fit."""
        ...

    def decide(self, result: Any) -> Any:
        """Return the result, or that of a step that is left out."""
        ...


class GuardedOptimization(_AutomaticOptimization):
    """The loop's optimization, whose step survives running out of memory."""

    def __init__(self, trainer: Trainer, replaced_loop: Any, recovery: StepRecovery) -> None:
        super().__init__(trainer)
        self.optim_progress = replaced_loop.optim_progress
        self._skip_backward = replaced_loop._skip_backward
        self._recovery = recovery
        self.original = replaced_loop

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        return GuardedClosure(
            self._recovery,
            kwargs,
            make_step_fn=self._make_step_fn,
            step_fn=self._make_step_fn(kwargs),
            backward_fn=self._make_backward_fn(optimizer),
            zero_grad_fn=self._make_zero_grad_fn(batch_idx, optimizer),
        )


class GuardedClosure(Closure):
    """One forward and backward; remembers how far it came."""

    # Nothing in it refers back to it: a cycle would keep every batch alive until the collector's next run.

    def __init__(
        self,
        recovery: StepRecovery,
        kwargs: Any,
        *,
        make_step_fn: Callable[[Any], Callable[[], Any]],
        **functions: Any,
    ) -> None:
        super().__init__(**functions)
        self.recovery, self.kwargs = recovery, kwargs
        self.logged: list[LogCall] = []
        self._make_step_fn, self._plain_backward_fn = make_step_fn, self._backward_fn
        self._marks: list[GradientMarks] = []
        if self._backward_fn is not None:
            self._backward_fn = partial(_marked, self._backward_fn, self._marks, recovery)

    def part(self, batch: Any, factor: float) -> Any:
        """Run forward and backward of a micro-batch of this step, its loss multiplied by ``factor``."""
        first = next(iter(self.kwargs))
        step_fn = partial(_weighted, self._make_step_fn({**self.kwargs, first: batch}), factor)
        return Closure(step_fn=step_fn, backward_fn=self._plain_backward_fn).closure()

    def zero_grad(self) -> None:
        """Set the gradients to zero, as the step on the whole batch would have, with its hooks."""
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()

    @property
    def marks(self) -> GradientMarks | None:
        """What had arrived of the gradients when the backward began; ``None`` before that."""
        return self._marks[0] if self._marks else None

    def closure(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; where memory runs out, run it again in parts or leave it out."""
        result, failure = self._try()
        # Outside the except clause: what the failed step held is free again.
        if failure is None:
            self.recovery.succeeded(self)
        else:
            result = self.recovery.recover(self, failure)
        self._marks.clear()  # done with; it refers to gradients
        return self.recovery.decide(result)

    def _try(self) -> tuple[Any, str | None]:
        recovery = self.recovery
        prepared = recovery.prepare(self)
        try:
            return super().closure(), None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if isinstance(error, TooLargeError):
                return None, SPLIT_ON_PURPOSE
            return None, Failure.of(error).summary[:200]
        finally:
            for put_back in prepared:
                put_back()


def _marked(
    backward: Callable[[Tensor], None], marks: list[GradientMarks], recovery: StepRecovery, loss: Tensor
) -> None:
    marks.append(GradientMarks(recovery.trainable))
    backward(loss)


def _weighted(step_fn: Callable[[], Any], factor: float) -> Any:
    result = step_fn()
    if result.closure_loss is None:
        return result
    return ClosureResult(closure_loss=result.closure_loss * factor, extra=result.extra)


# -- A batch cut into micro-batches, and their outputs and logged values put together again --


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor found; 1 without one."""
    for tensor in _tensors(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    return 1


def volume(batch: Any) -> int:
    """Return how many numbers a batch holds."""
    return sum(tensor.numel() for tensor in _tensors(batch))


def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into that many micro-batches (one per sample at most), equal but for one sample."""
    # Tensors whose first dimension is the batch's are cut, and so are lists and tuples of that length that
    # hold no tensors; everything else goes into each part. Nothing is copied.
    samples = samples_in(batch)
    bounds = [samples * part // parts for part in range(parts + 1)]
    return [_cut(batch, samples, start, end) for start, end in pairwise(bounds)]


def _cut(value: Any, samples: int, start: int, end: int) -> Any:
    def deeper(item: Any) -> Any:
        return _cut(item, samples, start, end)

    if isinstance(value, Tensor):
        return value[start:end] if value.ndim and value.shape[0] == samples else value
    return _mapped(
        value, deeper, lambda sequence: sequence[start:end] if len(sequence) == samples else sequence
    )


def _mapped(value: Any, function: Callable[[Any], Any], plain: Callable[[Any], Any]) -> Any:
    if isinstance(value, UserDict):
        made = value.__class__.__new__(value.__class__)
        vars(made).update(vars(value))
        made.data = {key: function(item) for key, item in value.data.items()}
        return made
    if isinstance(value, Mapping):
        items = {key: function(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: function(getattr(value, f.name)) for f in fields(value) if f.init})
    if isinstance(value, (list, tuple)):
        if not any(True for _ in _tensors(value)):
            return plain(value)
        items_ = [function(item) for item in value]
        return type(value)(*items_) if hasattr(value, "_fields") else type(value)(items_)
    return value


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, UserDict)):
        for item in value.values():
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def merged_extra(extras: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Return what a training step returned beside the loss, as one step on the whole batch would have."""
    # Single numbers are averaged with the weights; tensors with one entry a sample are joined; of anything
    # else the first is taken.
    merged: dict[str, Any] = {}
    for key, first in extras[0].items():
        values = [extra[key] for extra in extras if key in extra]
        if isinstance(first, Tensor) and first.ndim and len(values) == len(extras):
            merged[key] = torch.cat(values) if all(v.shape[1:] == first.shape[1:] for v in values) else first
        else:
            merged[key] = weighted_mean(values, weights)
    return merged


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean of numbers or single-element tensors; of anything else, the first."""
    first = values[0]
    number = isinstance(first, (int, float)) and not isinstance(first, bool)
    if len(values) != len(weights) or not (
        number or (isinstance(first, Tensor) and first.is_floating_point())
    ):
        return first
    return sum(w * v for w, v in zip(weights, values, strict=True))


@dataclass
class LogRecord:
    """Stands in for ``LightningModule.log`` while micro-batches run; says afterwards what one batch would have.

    A value logged with ``sync_dist=True`` is a collective: the other ranks make one a step, so this one must.
    """

    parts: list[list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]] = field(default_factory=list)

    def begin_part(self) -> None:
        self.parts.append([])

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        detached = value.detach() if type(value) is Tensor else value
        self.parts[-1].append((name, detached, args, kwargs))

    def replay(self, log: Callable[..., None], weights: Sequence[float], *, skip: int) -> None:
        """Log each value once, averaged over the micro-batches; the first ``skip`` were logged already."""
        for index, (name, _, args, kwargs) in enumerate(self.parts[0]):
            if index < skip:
                continue
            same = [part[index] for part in self.parts if index < len(part) and part[index][0] == name]
            if "batch_size" in kwargs and len(same) == len(self.parts):
                kwargs = {**kwargs, "batch_size": sum(call[3].get("batch_size", 0) for call in same)}
            log(name, weighted_mean([call[1] for call in same], weights), *args, **kwargs)


class KnownSizes:
    """Which volumes of a batch are known not to fit, and which of a micro-batch to fit."""

    # One failure may be an accident. After a second of at least that volume, such batches are too large.

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._too_large: int | None = None
        self._known_good = 0

    @property
    def some_too_large(self) -> bool:
        """Whether any volume is known not to fit."""
        return self._too_large is not None

    def is_too_large(self, batch: Any) -> bool:
        """Whether a batch is known not to fit and can be cut."""
        return self._too_large is not None and volume(batch) >= self._too_large and samples_in(batch) >= 2

    def parts_for(self, size: int) -> int:
        """Return into how many parts to cut a batch of this volume that is too large."""
        return max(2, -(-size // max(1, self._known_good)))

    def learn(self, size: int, parts: int) -> None:
        """Note that a batch of this volume did not fit, and in that many parts did."""
        if self._suspect is not None and size >= self._suspect:
            self._too_large = min(self._suspect, self._too_large or self._suspect)
        self._suspect = size if self._suspect is None else min(self._suspect, size)
        self._known_good = max(1, size // parts)


# -- One rank's step on a batch in micro-batches, unseen by the distributed wrapper --
# The micro-batches run on the module itself, where no gradient hook of the wrapper or the program fires; then
# the gradients are put in place. Sending them is the caller's matter.


class SplitStep:
    """Makes a training step on a batch in several parts, as one step on the whole would have been."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, *, loss_reduction: Literal["mean", "sum"]
    ) -> None:
        self._trainer, self._module, self._loss_reduction = trainer, module, loss_reduction

    def run(
        self, call: GuardedClosure, batch: Any, parts: int, missing: Sequence[nn.Parameter]
    ) -> tuple[Any, dict[nn.Parameter, Tensor | None]] | None:
        """Run the batch in that many parts."""
        # Returns what the step on the whole batch would have, and the ``missing`` gradients, which had not
        # come when memory ran out; ``None`` when it runs out again.
        samples = samples_in(batch)
        weights = [samples_in(part) / samples for part in split(batch, parts)]
        log, results = LogRecord(), list[Any]()
        trained = [p for p in self._module.parameters() if p.requires_grad]
        with gradients_apart(trained, hooks=False), self._as_after_forward(call):
            for parameter in set(trained).difference(missing):
                parameter.requires_grad_(False)  # its gradient has arrived already
            error = attempt(lambda: results.append(self._run_parts(call, split(batch, parts), weights, log)))
            gradients = {parameter: parameter.grad for parameter in missing}
        if error is None:
            with logs_as(self._module, "training_step"):
                done = len(log.parts[0]) if call.marks is not None else len(call.logged)
                log.replay(self._module.log, weights, skip=done)
            return results[0], gradients
        if not error.out_of_memory:
            raise error.error or BatchSizeError(error.summary)
        return None

    def _run_parts(
        self, call: GuardedClosure, parts: Sequence[Any], weights: Sequence[float], log: LogRecord
    ) -> Any:
        """Forward and backward of each micro-batch, whose gradients add up."""
        strategy, precision = self._trainer.strategy, self._trainer.precision_plugin
        refused = dict.fromkeys(("all_gather", "reduce", "broadcast"), _refuse_collective)
        total, extras = None, []
        with (
            on_plain_module(strategy),
            replaced(self._module, log=log),
            replaced(strategy, **refused),
            # Its hooks are for the gradients of the whole batch.
            replaced(precision, post_backward=lambda tensor, module: tensor.detach()),
        ):
            for part, weight in zip(parts, weights, strict=True):
                log.begin_part()
                step = call.part(part, weight if self._loss_reduction == "mean" else 1.0)
                if step.closure_loss is None:
                    continue
                share = step.closure_loss.detach()
                total = share if total is None else total + share
                extras.append(step.extra)
                del step
        extra = merged_extra(extras, weights) if extras and len(extras) == len(weights) else {}
        return ClosureResult(closure_loss=total, extra=extra)

    @contextmanager
    def _as_after_forward(self, call: GuardedClosure) -> Iterator[None]:
        """Where the whole batch had its forward, keep what that left: running statistics, metrics, lists."""
        if call.marks is None:
            yield
            return
        with Snapshot(BufferCopies(self._module), ModuleAttributes(self._module)):
            yield


def _refuse_collective(*args: Any, **kwargs: Any) -> None:
    raise BatchSizeError(
        "training_step communicates (all_gather, reduce or broadcast), so its batch cannot be split on one rank:"
        " the other ranks call it once. Use on_oom='skip' or a smaller batch."
    )
