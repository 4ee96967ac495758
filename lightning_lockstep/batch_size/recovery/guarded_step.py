"""The training step that survives running out of memory: where it is caught, and how far it had come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_lockstep._lightning import Trainer, _AutomaticOptimization, _Closure, _ClosureResult
from lightning_lockstep.batch_size.memory.out_of_memory import Failure, is_out_of_memory
from lightning_lockstep.distributed.ddp.reducer import GradientMarks

__all__ = [
    "SPLIT_ON_PURPOSE",
    "GuardedClosure",
    "GuardedOptimization",
    "LogCall",
    "StepRecovery",
    "TooLargeError",
]

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


class GuardedClosure(_Closure):
    """One forward and backward; remembers how far it came.

    Nothing in it refers back to it: a cycle would keep every batch alive until the collector's next run.
    """

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
        return _Closure(step_fn=step_fn, backward_fn=self._plain_backward_fn).closure()

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
    return _ClosureResult(closure_loss=result.closure_loss * factor, extra=result.extra)
