"""One rank's step on a batch in micro-batches, unseen by the distributed wrapper.

The micro-batches run on the module itself, with stand-ins for the parameters, so that no gradient hook of the
wrapper fires; then the gradients are put in place. Sending them is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from lightning_lockstep._lightning import LightningModule, Trainer, _ClosureResult
from lightning_lockstep._lightning.internals import logs_as
from lightning_lockstep.batch_size.memory.out_of_memory import attempt
from lightning_lockstep.batch_size.recovery.guarded_step import GuardedClosure
from lightning_lockstep.batch_size.recovery.micro_batches import LogRecord, merged_extra, samples_in, split
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.isolated import on_plain_module
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.steps.snapshot import BufferCopies, ModuleAttributes, Snapshot

__all__ = ["SplitStep"]


class SplitStep:
    """Makes a training step on a batch in several parts, as one step on the whole would have been."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, *, loss_reduction: Literal["mean", "sum"]
    ) -> None:
        self._trainer, self._module, self._loss_reduction = trainer, module, loss_reduction

    def run(
        self, call: GuardedClosure, batch: Any, parts: int, missing: Sequence[nn.Parameter]
    ) -> tuple[Any, dict[nn.Parameter, Tensor | None]] | None:
        """Run the batch in that many parts.

        Returns what the step on the whole batch would have, and the ``missing`` gradients, which had not come
        when memory ran out; ``None`` when it runs out again.
        """
        samples = samples_in(batch)
        weights = [samples_in(part) / samples for part in split(batch, parts)]
        log, results = LogRecord(), list[Any]()
        with self._stand_ins(missing) as stand_ins, self._as_after_forward(call):
            error = attempt(lambda: results.append(self._run_parts(call, split(batch, parts), weights, log)))
            gradients = {parameter: stand_ins[parameter].grad for parameter in missing}
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
        """Forward and backward of each micro-batch; gradients add up in the stand-ins."""
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
        return _ClosureResult(closure_loss=total, extra=extra)

    @contextmanager
    def _stand_ins(self, missing: Sequence[nn.Parameter]) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Let the module compute with parameters of the same values that nobody has hooked.

        Those whose gradient has arrived already get none.
        """
        wanted = set(missing)
        stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for part in self._module.modules():
            # Of the base class: a class of its own may rename them, or take no such arguments.
            own = nn.Module.named_parameters(part, recurse=False, remove_duplicate=False)
            places += [(part, name, p) for name, p in own if p.requires_grad]
        for part, name, parameter in places:
            if parameter not in stand_ins:
                stand_ins[parameter] = nn.Parameter(parameter.detach(), requires_grad=parameter in wanted)
            setattr(part, name, stand_ins[parameter])
        try:
            yield stand_ins
        finally:
            for part, name, parameter in places:
                setattr(part, name, parameter)

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
