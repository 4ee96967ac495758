"""A batch that does not fit during a run is run again in micro-batches under the same optimizer step.

Only the rank that ran out of memory does this, and DDP does not see its micro-batches. Then DDP is made to send the
gradients that the other ranks still wait for (see :mod:`lightning_lockstep.distributed.ddp_reducer`). They see an
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
from lightning_lockstep.distributed.ddp_reducer import (
    GradientMarks,
    ddp_of,
    deliver_gradients,
    why_not_resumable,
)
from lightning_lockstep.errors import BatchSizeError, CollectiveError, RankFailedError
from lightning_lockstep.steps.isolated import gradients_apart, on_plain_module
from lightning_lockstep.steps.patching import put_in_place, replaced
from lightning_lockstep.steps.snapshot import BufferCopies, ModuleAttributes, Part, restored


class Recovery:
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

    def count(self, text: str) -> None:
        self.recovered += 1
        # From some point on every batch may be split, and a few lines are enough.
        if self.recovered <= 3 or str(self.recovered).strip("0") in ("1", "3"):
            say(f"AutoBatchSize: rank {self.rank} {text} ({self.recovered} so far)")


def _why_not_here(trainer: Trainer, module: LightningModule) -> str:
    """Return why a step of this run cannot be made in parts, the same on all ranks; empty if it can."""
    strategy: Any = trainer.strategy
    if getattr(strategy, "sample_numbers", None) is not None:
        return "with random_numbers='of_sample' or batch_norm='of_batch' its parts would have other numbers"
    if getattr(getattr(strategy, "settings", None), "uneven_inputs", "") == "join":
        return "with uneven_inputs='join' other ranks may wait in a step for this rank's count of samples"
    if not module.automatic_optimization:
        return "the module uses manual optimization, so this package does not control its optimizer steps"
    return why_not_resumable(strategy.model)


class _Step(Closure):
    """Forward and backward of one batch, and again in parts if memory runs out."""

    # A reference cycle would keep every batch alive until the next garbage collection, so this is not in one.

    def __init__(self, recovery: Recovery, kwargs: Any, optimizer: Any, batch_idx: int) -> None:
        # kwargs: of training_step, the batch first.
        loop = recovery.loop
        backward: Callable[[Tensor], None] | None = loop._make_backward_fn(optimizer)
        # The gradients that were there when the backward of the whole batch began; empty if it has not.
        self._marks: list[GradientMarks] = []
        marked = None if backward is None else partial(_marked, self._marks, recovery.trained, backward)
        self._zero_grad = loop._make_zero_grad_fn(batch_idx, optimizer)
        super().__init__(loop._make_step_fn(kwargs), marked, self._zero_grad)
        self._recovery, self._kwargs, self._backward = recovery, kwargs, backward

    def closure(self, *args: Any, **kwargs: Any) -> Any:
        # A repetition must not log again. Because this runs around every step, it uses no context manager.
        module = self._recovery.module
        logged = LogRecord(module.log)
        undo = put_in_place(module, "log", logged)
        try:
            result = super().closure(*args, **kwargs)
            self._marks.clear()  # they refer to gradients
            return result
        except Exception as error:
            # The error of another rank may also say that memory ran out, but it ran out on that rank.
            if isinstance(error, (RankFailedError, CollectiveError)) or not is_out_of_memory(error):
                raise
            failure = Failure.of(error).summary[:200]
        finally:
            undo()
        # This is outside of the except clause, so that the memory of the failed step is free again.
        return self._again(failure, logged)

    def _again(self, failure: str, logged: LogRecord) -> Any:
        """Run the batch in more and more parts until they fit; send the gradients that other ranks wait for."""
        recovery, began = self._recovery, bool(self._marks)
        missing = self._marks.pop().missing(recovery.trained) if began else recovery.trained
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
                f"rank {recovery.rank} ran out of memory in batch {recovery.where}, and single samples do not fit"
                f" either ({samples} samples in the batch): {failure}"
            )
        recovery.count(f"split batch {recovery.where} into {parts} micro-batches: {failure}")
        result, gradients = done
        trainer = recovery.trainer
        deliver_gradients(ddp_of(trainer.strategy.model), gradients, backward_began=began)
        if result.closure_loss is not None:
            trainer.precision_plugin.post_backward(result.closure_loss, recovery.module)
        return result

    def _in_parts(
        self, parts: Sequence[Any], missing: Sequence[nn.Parameter], logged: LogRecord, *, began: bool
    ) -> tuple[Any, dict[nn.Parameter, Tensor | None]] | None:
        """Return what the whole batch would have, and its missing gradients; ``None`` if memory runs out."""
        # The parts run on the module itself, without the gradient hooks of the wrapper and the program.
        module, trained = self._recovery.module, self._recovery.trained
        log, results = LogRecord(), list[Any]()
        # If the forward of the whole batch had ended, the parts must not change again what it has left: running
        # statistics, metrics, lists. If it had only begun, they must not change the metrics that it has logged.
        left: list[Part] = [ModuleAttributes(metric) for metric in logged.metrics()]
        if began:
            left = [BufferCopies(module), ModuleAttributes(module)]
        with gradients_apart(trained, hooks=False), restored(*left):
            for parameter in set(trained).difference(missing):
                parameter.requires_grad_(False)  # its gradient has arrived already
            failed = attempt(lambda: results.append(self._run_parts(parts, log)))
            gradients = {parameter: parameter.grad for parameter in missing}
        if failed is None:
            with replaced(module, _current_fx_name="training_step"):
                # If its forward had ended, the whole batch has logged everything already.
                log.replay(module.log, without=log if began else logged)
            return results[0], gradients
        if not failed.out_of_memory:
            raise failed.error or BatchSizeError(failed.summary)
        return None

    def _run_parts(self, parts: Sequence[Any], log: LogRecord) -> Any:
        """Forward and backward of each micro-batch, whose gradients add up."""
        trainer, module = self._recovery.trainer, self._recovery.module
        strategy, precision = trainer.strategy, trainer.precision_plugin
        refused = dict.fromkeys(("all_gather", "reduce", "broadcast"), _refuse_collective)
        weights = getattr(strategy, "weights", None)
        sizes = [samples_in(part) for part in parts]
        shares = [size / sum(sizes) for size in sizes]
        name, total, extras = next(iter(self._kwargs)), None, []
        with (
            torch.enable_grad(),
            on_plain_module(strategy),
            replaced(module, log=log),
            replaced(strategy, **refused),
            replaced(weights, in_parts=True) if weights is not None else nullcontext(),
            # The hooks in it are for the gradients of the whole batch.
            replaced(precision, post_backward=lambda tensor, module: tensor.detach()),
        ):
            for part, size, share in zip(parts, sizes, shares, strict=True):
                log.begin_part(share, size)
                result = self._recovery.loop._make_step_fn({**self._kwargs, name: part})()
                if result.closure_loss is None:
                    continue
                loss = result.closure_loss * (share if self._recovery.loss_reduction == "mean" else 1.0)
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
