"""A batch that does not fit in mid-run: run again in micro-batches under the same optimizer step, or left out.

The rank concerned does it alone, its micro-batches out of the wrapper's sight (see
:mod:`lightning_lockstep.batch_size.recovery.split_step`); then the wrapper is made to send what it still owes (see
:mod:`lightning_lockstep.distributed.ddp.reducer`). The other ranks see an ordinary, slower step. What hangs on a
decision of all goes through a notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_lockstep._lightning import LightningModule, Trainer, _ClosureResult
from lightning_lockstep._lightning.internals import accumulates, logs_as
from lightning_lockstep.batch_size.memory.out_of_memory import release_memory
from lightning_lockstep.batch_size.recovery.guarded_step import (
    SPLIT_ON_PURPOSE,
    GuardedClosure,
    LogCall,
    TooLargeError,
)
from lightning_lockstep.batch_size.recovery.micro_batches import KnownSizes, samples_in, volume
from lightning_lockstep.batch_size.recovery.notices import Notice, Notices
from lightning_lockstep.batch_size.recovery.split_step import SplitStep
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.ddp.reducer import ddp_of, deliver_gradients
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.patching import put_in_place

__all__ = ["Recovery"]


class Recovery:
    """Runs a batch that did not fit again, or leaves it out."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        mode: Literal["split", "skip"],
        loss_reduction: Literal["mean", "sum"],
        communicator: Communicator,
        on_count: Callable[[int, str], None],
    ) -> None:
        self._trainer, self._module, self._mode = trainer, module, mode
        self._communicator = communicator
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.notices = Notices(communicator, on_count)
        self.recovered = 0  # batches of this rank that were split or skipped
        self._ddp = ddp_of(trainer.strategy.model)
        self._sizes = KnownSizes()
        self._split_step = SplitStep(trainer, module, loss_reduction=loss_reduction)
        self._last_logged: list[LogCall] | None = None

    def refresh(self) -> None:
        """Look again which parameters are trained: at the start of an epoch, where some may be frozen."""
        self.trainable = [p for p in self._module.parameters() if p.requires_grad]

    # -- around every step ------------------------------------------------------------------------------

    def prepare(self, call: GuardedClosure) -> list[Callable[[], None]]:
        """Note what the step logs, and let one that is known not to fit stop before its forward.

        A repetition must not log again, and a step left out still owes what it logs. Called around every step,
        so it is no context manager.
        """
        module, log, calls = self._module, self._module.log, call.logged

        def noted(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            log(name, value, *args, **kwargs)
            calls.append((name, value.detach() if type(value) is Tensor else value, args, kwargs))

        undo = [put_in_place(module, "log", noted)]
        if self._sizes.some_too_large and self._sizes.is_too_large(next(iter(call.kwargs.values()))):
            # The wrapper's own forward still runs: what it sends before the module's is owed to the others.
            undo.append(put_in_place(module, "training_step", _stop))
        return undo

    def succeeded(self, call: GuardedClosure) -> None:
        """Remember what a step logs."""
        if self._communicator.world_size > 1:
            self._last_logged = call.logged

    def decide(self, result: Any) -> Any:
        """Take the decision of a notice, at the end of a step in which gradients were reduced."""
        if self._mode == "skip" and self._module.device.type != "cpu":
            # The others' gradients, before which a notice is known, are reduced in the background there.
            torch.accelerator.synchronize()
        if self.notices.none:
            return result
        if accumulates(self._trainer):
            return result
        notice = self.notices.at(self._step)
        if notice is None:
            return result
        if notice.fatal:
            raise BatchSizeError(notice.text)
        for parameter in self.trainable:
            parameter.grad = None
        return _ClosureResult(closure_loss=None)

    @property
    def _step(self) -> int:
        """The optimizer step that is being made, counted by the loop and so alike on every rank."""
        return int(self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer_steps)

    # -- when memory has run out ------------------------------------------------------------------------

    def recover(self, call: GuardedClosure, failure: str) -> Any:
        """Run the batch again in micro-batches, or leave it out; then finish what is owed to the others."""
        release_memory()
        batch = next(iter(call.kwargs.values()))
        began = call.marks is not None
        missing = self.trainable if call.marks is None else call.marks.missing(self.trainable)
        if not began:
            call.zero_grad()
        done = self._in_micro_batches(call, batch, missing, failure) if self._mode == "split" else None
        if done is not None:
            result, gradients = done
            deliver_gradients(self._ddp, gradients, backward_began=began)
            if result.closure_loss is not None:
                self._trainer.precision_plugin.post_backward(result.closure_loss, self._module)
            return result
        fatal = self._mode == "split"  # not even single samples fit: every rank raises BatchSizeError
        text = f"left out batch {self._where()}: {failure}"
        self._notify(self._not_even_one(batch, failure) if fatal else text, fatal=fatal)
        self._count(text)
        self._log_as_before(call)
        deliver_gradients(self._ddp, dict.fromkeys(missing), backward_began=began)
        return _ClosureResult(closure_loss=None)

    def _in_micro_batches(
        self, call: GuardedClosure, batch: Any, missing: Sequence[nn.Parameter], failure: str
    ) -> tuple[Any, dict[nn.Parameter, Tensor | None]] | None:
        samples, size = samples_in(batch), volume(batch)
        parts = self._sizes.parts_for(size) if failure == SPLIT_ON_PURPOSE else 2
        while samples > 1:
            parts = min(parts, samples)
            done = self._split_step.run(call, batch, parts, missing)
            if done is not None:
                self._sizes.learn(size, parts)
                self._count(f"split batch {self._where()} into {parts} micro-batches: {failure}")
                return done
            if parts == samples:
                break
            release_memory()
            parts *= 2
        return None

    def _log_as_before(self, call: GuardedClosure) -> None:
        """Log what a step logs, with the values of the last one: the others wait for those they average."""
        if call.marks is not None or self._communicator.world_size == 1:
            return
        if self._last_logged is None:
            raise BatchSizeError(
                f"rank {self._communicator.rank} ran out of memory in its first step. Which logged values the other"
                " ranks average is known only after one complete step. Start with a smaller batch."
            )
        with logs_as(self._module, "training_step"):
            for name, value, args, kwargs in self._last_logged[len(call.logged) :]:
                self._module.log(name, value, *args, **kwargs)

    def _notify(self, text: str, *, fatal: bool) -> None:
        notice = Notice(self._step, fatal, f"rank {self._communicator.rank} {text}")
        if not self.notices.send(notice):
            raise BatchSizeError(f"{notice.text} (and not every rank answered, so this one stops alone)")

    def _count(self, text: str) -> None:
        self.recovered += 1
        self.notices.count(text)

    def _where(self) -> str:
        progress = self._trainer.fit_loop.epoch_loop
        return f"{progress.batch_idx} of epoch {self._trainer.current_epoch}"

    def _not_even_one(self, batch: Any, failure: str) -> str:
        return (
            f"ran out of memory in batch {self._where()}, and single samples do not fit either"
            f" ({samples_in(batch)} samples, {volume(batch)} values in the batch): {failure}"
        )


def _stop(*args: Any, **kwargs: Any) -> None:
    raise TooLargeError
