"""The training step that survives running out of memory: where it is caught, and how far it had come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_lockstep._lightning import Trainer, _AutomaticOptimization, _Closure
from lightning_lockstep.distributed.reducer import GradientMarks
from lightning_lockstep.memory import Failure, is_out_of_memory

if TYPE_CHECKING:
    from lightning_lockstep.callbacks._recovery import Recovery

__all__ = ["SPLIT_ON_PURPOSE", "GuardedClosure", "GuardedOptimization", "LogCall", "TooLargeError"]

SPLIT_ON_PURPOSE = "this batch is as large as one that did not fit"


LogCall = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


class TooLargeError(MemoryError):
    """Raised in place of a step that is known not to fit."""


class GuardedOptimization(_AutomaticOptimization):
    """The loop's optimization, whose step survives running out of memory.

    Args:
        trainer: The Trainer.
        replaced_loop: What it takes the place of; the progress counters are shared.
        recovery: What to do.

    Ranks: every rank, alone.
    """

    def __init__(self, trainer: Trainer, replaced_loop: Any, recovery: Recovery) -> None:
        super().__init__(trainer)
        self.optim_progress = replaced_loop.optim_progress
        self._skip_backward = replaced_loop._skip_backward
        self._recovery = recovery
        self.original = replaced_loop

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        return GuardedClosure(
            self._recovery,
            kwargs,
            optimizer,
            step_fn=self._make_step_fn(kwargs),
            backward_fn=self._make_backward_fn(optimizer),
            zero_grad_fn=self._make_zero_grad_fn(batch_idx, optimizer),
        )


class GuardedClosure(_Closure):
    """One forward and backward; remembers how far it came."""

    def __init__(self, recovery: Recovery, kwargs: Any, optimizer: Any, **functions: Any) -> None:
        super().__init__(**functions)
        self.recovery, self.kwargs, self.optimizer = recovery, kwargs, optimizer
        self.marks: GradientMarks | None = None
        self.logged: list[LogCall] = []
        if self._backward_fn is not None:
            backward = self._backward_fn

            def marked(loss: Tensor) -> None:
                self.marks = GradientMarks(recovery.trainable)
                backward(loss)

            self._backward_fn = marked

    def closure(self, *args: Any, **kwargs: Any) -> Any:
        result, failure = self._try()
        # Outside the except clause: what the failed step held is free again.
        if failure is not None:
            result = self.recovery.recover(self, failure)
        return self.recovery.decide(self, result)

    def _try(self) -> tuple[Any, str | None]:
        recovery = self.recovery
        try:
            with recovery.counted_logs(self), recovery.stopped_if_too_large(self.kwargs):
                return super().closure(), None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if isinstance(error, TooLargeError):
                return None, SPLIT_ON_PURPOSE
            return None, Failure.of(error).summary[:200]
