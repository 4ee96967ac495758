"""A batch that does not fit during a run is run again in micro-batches under the same optimizer step.

Only the rank that ran out of memory does this, and DDP does not see its micro-batches. Then DDP is made to send the
gradients that the other ranks still wait for (see :mod:`lightning_lockstep.distributed.c10d_operators`). They see an
ordinary, slower step. If single samples do not fit either, the rank raises, as it would without this. Nothing more is
sent for a step that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_lockstep._lightning import Closure, ClosureResult, LightningModule, Trainer
from lightning_lockstep._text import say
from lightning_lockstep.batch_size.memory import Failure, attempt, is_out_of_memory, release_memory
from lightning_lockstep.batch_size.split_step import LogRecord, merged_extra, samples_in, split
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.c10d_operators import (
    GradientMarks,
    ddp_of,
    deliver_gradients,
    why_not_resumable,
)
from lightning_lockstep.errors import BatchSizeError, CollectiveError, RankFailedError
from lightning_lockstep.steps.isolated import gradients_apart, on_plain_module
from lightning_lockstep.steps.patching import put_in_place, replaced
from lightning_lockstep.steps.snapshot import BufferCopies, ModuleAttributes, Part, Snapshot


class _GuardedClosure(Closure):
    """Forward and backward of one batch, which a :class:`Recovery` runs."""

    # A reference cycle would keep every batch alive until the next garbage collection, so this is not in one.

    def __init__(
        self,
        recovery: Recovery,
        kwargs: dict[str, Any],  # of training_step, the batch first
        make_step: Callable[[Any], Callable[[], Any]],
        backward: Callable[[Tensor], None] | None,
        zero_grad: Callable[[], None] | None,
    ) -> None:
        marked = None if backward is None else partial(recovery.run_backward, backward)
        super().__init__(make_step(kwargs), marked, zero_grad)
        self._recovery, self.kwargs, self.make_step = recovery, kwargs, make_step
        self.backward, self.zero_grad = backward, zero_grad

    @property
    def batch(self) -> Any:
        return next(iter(self.kwargs.values()))

    def closure(self, *args: Any, **kwargs: Any) -> Any:
        return self._recovery.run(self, super().closure)


class Recovery:
    """Lets the training steps of a fit survive running out of memory; all ranks make it together."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        loss_reduction: Literal["mean", "sum"],  # how the training step's loss adds up over samples
    ) -> None:
        reason = why_not_resumable(trainer.strategy.model)
        if not module.automatic_optimization:
            reason = (
                "the module uses manual optimization, so this package does not control its optimizer steps"
            )
        if getattr(getattr(trainer.strategy, "settings", None), "uneven_inputs", "") == "join":
            reason = (
                "with uneven_inputs='join' other ranks may wait in a step for this rank's count of samples"
            )
        if getattr(trainer.strategy, "sample_numbers", None) is not None:
            reason = (
                "with random_numbers='of_sample' or batch_norm='of_batch' its parts would have other numbers"
            )
        if reason:
            raise BatchSizeError(f"on_oom='split' is not possible here: {reason}")
        self._trainer, self._module = trainer, module
        self._loss_reduction = loss_reduction
        self._ddp = ddp_of(trainer.strategy.model)
        self._communicator = current_communicator()
        self.recovered = 0  # batches of this rank that were split
        self._epoch, self._trainable = -1, self._trained_now()
        # For the current step: its gradients when its backward began, and what it has logged.
        self._marks: GradientMarks | None = None
        self._logged = LogRecord()
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self.close = put_in_place(loop, "_make_closure", self._make_closure)  # gives it its own closures back
        if (weights := getattr(trainer.strategy, "weights", None)) is not None:
            weights.splits = True

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> _GuardedClosure:
        """Return a closure that can be run again in parts."""
        loop = self._trainer.fit_loop.epoch_loop.automatic_optimization
        backward = loop._make_backward_fn(optimizer)
        zero_grad = loop._make_zero_grad_fn(batch_idx, optimizer)
        return _GuardedClosure(self, kwargs, loop._make_step_fn, backward, zero_grad)

    def _trained_now(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]

    # -- every step -------------------------------------------------------------------------------------

    def run(self, call: _GuardedClosure, whole: Callable[[], Any]) -> Any:
        """Run a step, and again in parts if memory runs out."""
        if self._trainer.current_epoch != self._epoch:  # an epoch, or a resume, may freeze other parameters
            self._epoch, self._trainable = self._trainer.current_epoch, self._trained_now()
        result, failure = self._attempt(call, whole)
        # This is outside of the except clause, so that the memory of the failed step is free again.
        if failure is not None:
            result = self._recover(call, failure)
        self._marks = None  # it refers to gradients
        return result

    def run_backward(self, backward: Callable[[Tensor], None], loss: Tensor) -> None:
        """Run the backward of a whole batch."""
        self._marks = GradientMarks(self._trainable)
        backward(loss)

    def _attempt(self, call: _GuardedClosure, whole: Callable[[], Any]) -> tuple[Any, str | None]:
        # A repetition must not log again. Because this runs around every step, it uses no context manager.
        module = self._module
        self._marks, self._logged = None, LogRecord(module.log)
        self._logged.begin_part()
        undo = put_in_place(module, "log", self._logged)
        try:
            return whole(), None
        except Exception as error:
            # The error of another rank may also say that memory ran out, but it ran out on that rank.
            if isinstance(error, (RankFailedError, CollectiveError)) or not is_out_of_memory(error):
                raise
            return None, Failure.of(error).summary[:200]
        finally:
            undo()

    # -- when memory has run out ------------------------------------------------------------------------

    def _recover(self, call: _GuardedClosure, failure: str) -> Any:
        """Run the batch again in micro-batches, then send the gradients that the other ranks wait for."""
        began = self._marks is not None
        missing = self._trainable if self._marks is None else self._marks.missing(self._trainable)
        if not began and call.zero_grad is not None:
            call.zero_grad()  # as the step on the whole batch would have done
        result, gradients = self._in_micro_batches(call, missing, failure)
        deliver_gradients(self._ddp, gradients, backward_began=began)
        if result.closure_loss is not None:
            self._trainer.precision_plugin.post_backward(result.closure_loss, self._module)
        return result

    def _in_micro_batches(
        self, call: _GuardedClosure, missing: Sequence[nn.Parameter], failure: str
    ) -> tuple[Any, dict[nn.Parameter, Tensor | None]]:
        samples, parts = samples_in(call.batch), 1
        while parts < samples:
            release_memory()
            parts = min(2 * parts, samples)
            done = self._in_parts(call, parts, missing)
            if done is not None:
                self._count(f"split batch {self._where} into {parts} micro-batches: {failure}")
                return done
        raise BatchSizeError(
            f"rank {self._communicator.rank} ran out of memory in batch {self._where}, and single samples do not fit"
            f" either ({samples} samples in the batch): {failure}"
        )

    def _in_parts(
        self, call: _GuardedClosure, parts: int, missing: Sequence[nn.Parameter]
    ) -> tuple[Any, dict[nn.Parameter, Tensor | None]] | None:
        """Run the batch in that many parts."""
        # The parts run on the module itself, without the gradient hooks of the wrapper and the program. This returns
        # what the step on the whole batch would have returned, and the ``missing`` gradients, which had not arrived
        # when memory ran out; ``None`` if memory runs out again.
        samples = samples_in(call.batch)
        weights = [samples_in(part) / samples for part in split(call.batch, parts)]
        log, results = LogRecord(), list[Any]()
        trained, module = self._trained_now(), self._module
        # If the forward of the whole batch had ended, the parts must not change again what it has left: running
        # statistics, metrics, lists. If it had only begun, they must not change the metrics that it has logged.
        left: list[Part] = [ModuleAttributes(metric) for metric in self._logged.metrics()]
        if self._marks is not None:
            left = [BufferCopies(module), ModuleAttributes(module)]
        with gradients_apart(trained, hooks=False), Snapshot(*left):
            for parameter in set(trained).difference(missing):
                parameter.requires_grad_(False)  # its gradient has arrived already
            failed = attempt(lambda: results.append(self._run_parts(call, weights, log)))
            gradients = {parameter: parameter.grad for parameter in missing}
        if failed is None:
            with replaced(module, _current_fx_name="training_step"):
                # If its forward had ended, the whole batch has logged everything already.
                log.replay(module.log, without=log if self._marks is not None else self._logged)
            return results[0], gradients
        if not failed.out_of_memory:
            raise failed.error or BatchSizeError(failed.summary)
        return None

    def _run_parts(self, call: _GuardedClosure, shares: Sequence[float], log: LogRecord) -> Any:
        """Forward and backward of each micro-batch, whose gradients add up."""
        strategy, precision = self._trainer.strategy, self._trainer.precision_plugin
        refused = dict.fromkeys(("all_gather", "reduce", "broadcast"), _refuse_collective)
        name, total, extras = next(iter(call.kwargs)), None, []
        weights = getattr(strategy, "weights", None)
        with (
            torch.enable_grad(),
            on_plain_module(strategy),
            replaced(self._module, log=log),
            replaced(strategy, **refused),
            replaced(weights, in_parts=True) if weights is not None else nullcontext(),
            # The hooks in it are for the gradients of the whole batch.
            replaced(precision, post_backward=lambda tensor, module: tensor.detach()),
        ):
            for part, weight in zip(split(call.batch, len(shares)), shares, strict=True):
                log.begin_part(weight, samples_in(part))
                result = call.make_step({**call.kwargs, name: part})()
                if result.closure_loss is None:
                    continue
                loss = result.closure_loss * (weight if self._loss_reduction == "mean" else 1.0)
                if call.backward is not None:
                    call.backward(loss)
                total = loss.detach() if total is None else total + loss.detach()
                extras.append(result.extra)
                del result, loss
        extra = merged_extra(extras, shares) if extras and len(extras) == len(shares) else {}
        return ClosureResult(closure_loss=total, extra=extra)

    @property
    def _where(self) -> str:
        return f"{self._trainer.fit_loop.epoch_loop.batch_idx} of epoch {self._trainer.current_epoch}"

    def _count(self, text: str) -> None:
        self.recovered += 1
        # From some point on every batch may be split, and a few lines are enough.
        if self.recovered <= 3 or str(self.recovered).strip("0") in ("1", "3"):
            say(f"AutoBatchSize: rank {self._communicator.rank} {text} ({self.recovered} so far)")


def _refuse_collective(*args: Any, **kwargs: Any) -> None:
    raise BatchSizeError(
        "training_step communicates (all_gather, reduce or broadcast), so its batch cannot be split on one rank,"
        " because the other ranks communicate once. Use a smaller batch."
    )
