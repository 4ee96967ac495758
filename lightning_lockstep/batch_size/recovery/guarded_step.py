"""The training step that survives running out of memory: where it is caught, and how far it had come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_lockstep._lightning import Trainer, _AutomaticOptimization, _Closure
from lightning_lockstep.batch_size.memory.out_of_memory import Failure, is_out_of_memory
from lightning_lockstep.distributed.ddp_reducer import GradientMarks

if TYPE_CHECKING:
    from lightning_lockstep.batch_size.recovery.recover import Recovery

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
    """One forward and backward; remembers how far it came.

    Nothing in it refers back to it: a cycle would keep every batch alive until the collector's next run.
    """

    def __init__(self, recovery: Recovery, kwargs: Any, optimizer: Any, **functions: Any) -> None:
        super().__init__(**functions)
        self.recovery, self.kwargs, self.optimizer = recovery, kwargs, optimizer
        self.logged: list[LogCall] = []
        self._marks: list[GradientMarks] = []
        if self._backward_fn is not None:
            self._backward_fn = partial(_marked, self._backward_fn, self._marks, recovery)

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
            recovery.put_back(prepared)


def _marked(
    backward: Callable[[Tensor], None], marks: list[GradientMarks], recovery: Recovery, loss: Tensor
) -> None:
    marks.append(GradientMarks(recovery.trainable))
    backward(loss)
