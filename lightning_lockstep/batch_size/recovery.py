"""A batch that does not fit in mid-run: split, halved or refused, alike on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_lockstep._doors.lightning import ClosureResult, LightningModule, Trainer
from lightning_lockstep._doors.lightning_internals import accumulates, logs_as
from lightning_lockstep.batch_size.loaders import SearchRefusedError
from lightning_lockstep.batch_size.memory import release_memory
from lightning_lockstep.batch_size.split_step import (
    SPLIT_ON_PURPOSE,
    GuardedClosure,
    GuardedOptimization,
    KnownSizes,
    LogCall,
    SplitStep,
    TooLargeError,
    samples_in,
    volume,
)
from lightning_lockstep.distributed import Communicator, Message, current_communicator
from lightning_lockstep.distributed.c10d_operators import ddp_of, deliver_gradients, why_not_resumable
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.capabilities import HasEngineTrials
from lightning_lockstep.steps.patching import put_in_place

# -- What a rank that runs out of memory in mid-run sends to the others, at no cost to a step --
# The others wait in their backward for the gradients that this rank owes. It posts its notice, and sends
# the gradients only once every rank has acknowledged it, so each finds the notice when its backward
# returns: all take the same decision in the same step, and a step without a notice costs one attribute
# read.

_NOTICE, _ACKNOWLEDGED, _COUNT = "batch_size/notice", "batch_size/acknowledged", "batch_size/count"


@dataclass(frozen=True)
class Notice:
    """A decision that all ranks take at the end of the same optimizer step."""

    step: int  # of the optimizer, counted alike on every rank
    fatal: bool  # the run ends; otherwise the step is left out
    text: str  # what happened, with the rank


class Notices:
    """Sends and receives notices."""

    def __init__(self, communicator: Communicator, on_count: Callable[[int, str], None]) -> None:
        self._communicator = communicator
        self._channel = communicator.side_channel  # opened here, by all ranks together
        self._waiting: set[int] = set()
        self._all_acknowledged = threading.Event()
        # By step, and then by rank: the next step's may come before this one's was read, and where two ranks
        # ran out in one step all must give the same reason.
        self._notices: dict[int, dict[int, Notice]] = {}
        self._remove = [
            self._channel.on(_NOTICE, self._receive),
            self._channel.on(_ACKNOWLEDGED, self._acknowledged),
            self._channel.on(_COUNT, lambda message: on_count(message.sender, str(message.body))),
        ]

    def count(self, text: str) -> None:
        """Let rank 0 know that this rank split or skipped a batch."""
        self._channel.post(_COUNT, text, to=0)

    def send(self, notice: Notice, timeout: float = 60.0) -> bool:  # timeout [s]
        """Make every rank take the decision, before sending what is owed; return whether all acknowledged."""
        self._keep(self._communicator.rank, notice)
        others = set(range(self._communicator.world_size)) - {self._communicator.rank}
        if not others:
            return True
        self._waiting = others
        self._all_acknowledged.clear()
        self._channel.post(_NOTICE, [notice.step, notice.fatal, notice.text])
        return self._all_acknowledged.wait(timeout)

    @property
    def none(self) -> bool:
        """Whether there is no notice for any step."""
        return not self._notices

    def at(self, step: int) -> Notice | None:
        """Return the notice for this optimizer step, once; of several the lowest rank's."""
        notices = self._notices.pop(step, None)
        return None if notices is None else notices[min(notices)]

    def close(self) -> None:
        for remove in self._remove:
            remove()

    def _receive(self, message: Message) -> None:
        self._keep(message.sender, Notice(*message.body))
        self._channel.post(_ACKNOWLEDGED, to=message.sender)

    def _acknowledged(self, message: Message) -> None:
        self._waiting.discard(message.sender)
        if not self._waiting:
            self._all_acknowledged.set()

    def _keep(self, rank: int, notice: Notice) -> None:
        # One operation each under the interpreter's lock: the receiving thread and this one both come here.
        self._notices.setdefault(notice.step, {})[rank] = notice


# -- A batch that does not fit in mid-run: run again in micro-batches under the same optimizer step, or left
# out
#
# The rank concerned does it alone, its micro-batches out of the wrapper's sight (see
# :mod:`lightning_lockstep.batch_size.split_step`); then the wrapper is made to send what it still
# owes (see :mod:`lightning_lockstep.distributed.c10d_operators`). The other ranks see an ordinary, slower
# step. What hangs on a decision of all goes through a notice.


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
        """Note what the step logs, and let one that is known not to fit stop before its forward."""
        # A repetition must not log again, and a step left out still owes what it logs. Called around every
        # step, so it is no context manager.
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
        return ClosureResult(closure_loss=None)

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
        return ClosureResult(closure_loss=None)

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


# -- The guard around the training steps of a fit, put in place and taken away --


def refuse_engine(trainer: Trainer, on_oom: str) -> None:
    """Raise where an engine makes the steps, which cannot be run again in parts."""
    if isinstance(trainer.strategy, HasEngineTrials):
        raise SearchRefusedError(
            f"on_oom={on_oom!r} is not possible with {type(trainer.strategy).__name__}: its engine reduces gradients"
            " while the backward runs, and a batch that ended half way cannot be finished in parts. Write"
            " on_oom='raise'; the search for a batch size works."
        )


def guard_fit(
    trainer: Trainer,
    module: LightningModule,
    *,
    on_oom: Literal["split", "skip"],
    loss_reduction: Literal["mean", "sum"],  # how the training step's loss adds up over samples
    on_count: Callable[[int, str], None],  # on rank 0, with (rank, text), for each batch split or skipped
) -> Recovery:
    """Have the training steps of a fit survive running out of memory; all ranks, together."""
    reason = why_not_resumable(trainer.strategy.model)
    if not module.automatic_optimization:
        reason = "the module uses manual optimization, so this package does not control its optimizer steps"
    if reason:
        raise BatchSizeError(f"on_oom={on_oom!r} is not possible here: {reason}")
    recovery = Recovery(
        trainer,
        module,
        mode=on_oom,
        loss_reduction=loss_reduction,
        communicator=current_communicator(),
        on_count=on_count,
    )
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization = GuardedOptimization(trainer, loop.automatic_optimization, recovery)
    return recovery


def unguard_fit(trainer: Trainer, recovery: Recovery) -> None:
    """Let the loop take its steps without a guard again."""
    recovery.notices.close()
    loop = trainer.fit_loop.epoch_loop
    if isinstance(loop.automatic_optimization, GuardedOptimization):
        loop.automatic_optimization = loop.automatic_optimization.original
