"""A batch that does not fit during a run: run again in micro-batches under the same optimizer step, or left out.

The rank concerned does it alone, its micro-batches out of the wrapper's sight; then the wrapper is made to send what
it still owes (see :mod:`lightning_lockstep.distributed.c10d_operators`). The other ranks see an ordinary, slower step.
What hangs on a decision of all (a step that is left out, or the end of the run) goes through a notice: the others wait
in their backward for the gradients that this rank owes; it posts its notice, and sends the gradients only once every
rank has acknowledged it, so each finds the notice when its backward returns. All take the same decision in the same
step, and a step without a notice costs one attribute read.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_lockstep._lightning import Closure, ClosureResult, LightningModule, Trainer
from lightning_lockstep.batch_size.memory import Failure, attempt, is_out_of_memory, release_memory
from lightning_lockstep.batch_size.split_step import LogRecord, merged_extra, samples_in, split, volume
from lightning_lockstep.distributed import Message, current_communicator
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

_guards = itertools.count()
_PATIENCE = 60.0  # for the acknowledgements of all ranks [s]
_ON_PURPOSE = "this batch is as large as one that did not fit"


class _TooLargeError(MemoryError):
    """Raised in place of a step that is known not to fit."""


class _GuardedClosure(Closure):
    """Forward and backward of one batch, which a :class:`Recovery` runs."""

    # Nothing in it refers back to it: a cycle would keep every batch alive until the collector's next run.

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
    """Has the training steps of a fit survive running out of memory; made and closed by all ranks, together."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        mode: Literal["split", "skip"],
        loss_reduction: Literal["mean", "sum"],  # how the training step's loss adds up over samples
        on_count: Callable[[int, str], None],  # on rank 0, with (rank, text), for each batch split or skipped
    ) -> None:
        reason = why_not_resumable(trainer.strategy.model)
        if not module.automatic_optimization:
            reason = (
                "the module uses manual optimization, so this package does not control its optimizer steps"
            )
        if reason:
            raise BatchSizeError(f"on_oom={mode!r} is not possible here: {reason}")
        self._trainer, self._module = trainer, module
        self._mode, self._loss_reduction = mode, loss_reduction
        self._ddp = ddp_of(trainer.strategy.model)
        self._communicator = current_communicator()
        self._channel = self._communicator.side_channel  # opened here, by all ranks together
        self.recovered = 0  # batches of this rank that were split or skipped
        self._epoch, self._trainable = -1, self._trained_now()
        # Of the step that is being made: what had arrived of the gradients when its backward began, what it logged.
        self._marks: GradientMarks | None = None
        self._logged = LogRecord()
        self._last_logged: LogRecord | None = None  # by the last step that fitted
        # One failure may be an accident. After a second of at least that volume, such batches are too large.
        self._suspect: int | None = None
        self._too_large: int | None = None
        self._fitted = 1  # volume of a micro-batch that did
        # (the run ends, what happened) by step, and then by rank: the next step's may come before this one's was
        # read, and where two ranks ran out in one step all must give the same reason.
        self._notices: dict[int, dict[int, tuple[bool, str]]] = {}
        self._news = threading.Condition()
        self._acknowledged: set[int] = set()  # ranks that have the last notice of this one
        # Separate topics: where an error has ended a fit, the guard of that one still listens in the next.
        number = next(_guards)
        self._notice_topic = f"batch_size/{number}/notice"
        self._answer_topic = f"batch_size/{number}/acknowledged"
        self._count_topic = f"batch_size/{number}/count"
        self._undo: list[Callable[[], Any]] = [
            self._channel.on(self._notice_topic, self._receive),
            self._channel.on(self._answer_topic, self._receive_acknowledgement),
            self._channel.on(self._count_topic, lambda message: on_count(message.sender, str(message.body))),
            self._guard_closures(),
        ]

    def close(self) -> None:
        """Let the loop take its steps without a guard again."""
        for undo in self._undo:
            undo()

    def _guard_closures(self) -> Callable[[], Any]:
        """Have the fit loop take guarded closures, whose parts can be run again; returns what undoes it."""
        loop = self._trainer.fit_loop.epoch_loop.automatic_optimization

        def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
            backward, zero_grad = (
                loop._make_backward_fn(optimizer),
                loop._make_zero_grad_fn(batch_idx, optimizer),
            )
            return _GuardedClosure(self, kwargs, loop._make_step_fn, backward, zero_grad)

        return put_in_place(loop, "_make_closure", make_closure)

    def _trained_now(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]

    # -- every step -------------------------------------------------------------------------------------

    def run(self, call: _GuardedClosure, whole: Callable[[], Any]) -> Any:
        """Run a step; where memory runs out, run it again in parts or leave it out."""
        if self._trainer.current_epoch != self._epoch:  # it may begin, or be resumed, with some frozen
            self._epoch, self._trainable = self._trainer.current_epoch, self._trained_now()
        result, failure = self._attempt(call, whole)
        # Outside the except clause: what the failed step held is free again.
        if failure is not None:
            result = self._recover(call, failure)
        elif self._communicator.world_size > 1:
            self._last_logged = self._logged
        self._marks = None  # it refers to gradients
        return self._decided(result)

    def run_backward(self, backward: Callable[[Tensor], None], loss: Tensor) -> None:
        """Run the backward of a whole batch."""
        self._marks = GradientMarks(self._trainable)
        backward(loss)

    def _attempt(self, call: _GuardedClosure, whole: Callable[[], Any]) -> tuple[Any, str | None]:
        # A repetition must not log again, and a step left out still owes what it logs. Called around every step,
        # so without a context manager.
        module = self._module
        self._marks, self._logged = None, LogRecord(module.log)
        self._logged.begin_part()
        undo = [put_in_place(module, "log", self._logged)]
        if (
            self._too_large is not None
            and volume(call.batch) >= self._too_large
            and samples_in(call.batch) > 1
        ):
            # The wrapper's own forward still runs: what it sends before the module's is owed to the others.
            undo.append(put_in_place(module, "training_step", _stop))
        try:
            return whole(), None
        except Exception as error:
            # The error of another rank may say what ran out there.
            if isinstance(error, (RankFailedError, CollectiveError)) or not is_out_of_memory(error):
                raise
            return None, _ON_PURPOSE if isinstance(error, _TooLargeError) else Failure.of(error).summary[:200]
        finally:
            for put_back in undo:
                put_back()

    def _decided(self, result: Any) -> Any:
        """Take the decision of a notice, at the end of a step in which gradients were reduced."""
        if self._mode == "skip" and self._module.device.type != "cpu":
            # The others' gradients, before which a notice is known, are reduced in the background there.
            torch.accelerator.synchronize()
        if not self._notices or self._trainer.fit_loop._should_accumulate():
            return result
        notices = self._notices.pop(self._step, None)
        if notices is None:
            return result
        fatal, text = notices[min(notices)]
        if fatal:
            raise BatchSizeError(text)
        for parameter in self._trainable:
            parameter.grad = None
        return ClosureResult(closure_loss=None)

    @property
    def _step(self) -> int:
        """The optimizer step that is being made, counted by the loop and so the same on every rank."""
        return int(self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer_steps)

    # -- when memory has run out ------------------------------------------------------------------------

    def _recover(self, call: _GuardedClosure, failure: str) -> Any:
        """Run the batch again in micro-batches, or leave it out; then finish what is owed to the others."""
        release_memory()
        began = self._marks is not None
        missing = self._trainable if self._marks is None else self._marks.missing(self._trainable)
        if not began and call.zero_grad is not None:
            call.zero_grad()  # with its hooks, as the step on the whole batch would have
        done = self._in_micro_batches(call, missing, failure) if self._mode == "split" else None
        if done is not None:
            result, gradients = done
            deliver_gradients(self._ddp, gradients, backward_began=began)
            if result.closure_loss is not None:
                self._trainer.precision_plugin.post_backward(result.closure_loss, self._module)
            return result
        left_out = f"left out batch {self._where}: {failure}"
        if self._mode == "skip":
            self._notify(left_out, fatal=False)
        else:
            batch = f"{samples_in(call.batch)} samples, {volume(call.batch)} values in the batch"
            too_much = (
                f"ran out of memory in batch {self._where}, and single samples do not fit either ({batch})"
            )
            self._notify(f"{too_much}: {failure}", fatal=True)
        self._count(left_out)
        if not began:
            self._log_as_before()
        deliver_gradients(self._ddp, dict.fromkeys(missing), backward_began=began)
        return ClosureResult(closure_loss=None)

    def _in_micro_batches(
        self, call: _GuardedClosure, missing: Sequence[nn.Parameter], failure: str
    ) -> tuple[Any, dict[nn.Parameter, Tensor | None]] | None:
        samples, size = samples_in(call.batch), volume(call.batch)
        parts = max(2, -(-size // self._fitted)) if failure == _ON_PURPOSE else 2
        while samples > 1:
            parts = min(parts, samples)
            done = self._in_parts(call, parts, missing)
            if done is not None:
                if self._suspect is not None and size >= self._suspect:
                    self._too_large = self._suspect
                self._suspect = min(size, self._suspect or size)
                self._fitted = max(1, size // parts)
                self._count(f"split batch {self._where} into {parts} micro-batches: {failure}")
                return done
            if parts == samples:
                break
            release_memory()
            parts *= 2
        return None

    def _in_parts(
        self, call: _GuardedClosure, parts: int, missing: Sequence[nn.Parameter]
    ) -> tuple[Any, dict[nn.Parameter, Tensor | None]] | None:
        """Run the batch in that many parts."""
        # They run on the module itself, where no gradient hook of the wrapper or the program fires. Returns what
        # the step on the whole batch would have, and the ``missing`` gradients, which had not come when memory ran
        # out; ``None`` when it runs out again.
        samples = samples_in(call.batch)
        weights = [samples_in(part) / samples for part in split(call.batch, parts)]
        log, results = LogRecord(), list[Any]()
        trained, module = self._trained_now(), self._module
        # Where the whole batch had its forward, what that left is kept: running statistics, metrics, lists. Where it
        # had a part of it, so are the metrics that it logged.
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
                # With its forward done the whole batch has logged all there is.
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
        weights = strategy.lifecycle.weights if hasattr(strategy, "lifecycle") else None
        with (
            torch.enable_grad(),
            on_plain_module(strategy),
            replaced(self._module, log=log),
            replaced(strategy, **refused),
            replaced(weights, in_parts=samples_in(call.batch)) if weights is not None else nullcontext(),
            # Its hooks are for the gradients of the whole batch.
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

    def _log_as_before(self) -> None:
        """Log what a step logs, with the values of the last one: the others wait for those they average."""
        if self._communicator.world_size == 1:
            return
        if self._last_logged is None:
            raise BatchSizeError(
                f"rank {self._communicator.rank} ran out of memory in its first step. Which logged values the other"
                " ranks average is known only after one complete step. Start with a smaller batch."
            )
        with replaced(self._module, _current_fx_name="training_step"):
            self._last_logged.replay(self._module.log, without=self._logged)

    @property
    def _where(self) -> str:
        return f"{self._trainer.fit_loop.epoch_loop.batch_idx} of epoch {self._trainer.current_epoch}"

    # -- what is sent, at no cost to a step without it --------------------------------------------------

    def _notify(self, text: str, *, fatal: bool) -> None:
        """Make every rank take the decision, before what is owed is sent."""
        text = f"rank {self._communicator.rank} {text}"
        self._keep(self._communicator.rank, self._step, fatal, text)
        others = self._communicator.world_size - 1
        self._acknowledged.clear()
        self._channel.post(self._notice_topic, [self._step, fatal, text])
        with self._news:
            answered = self._channel.wait_for(
                self._news, lambda: len(self._acknowledged) == others, _PATIENCE
            )
        if not answered:
            raise BatchSizeError(f"{text} (and not every rank answered, so this one stops alone)")

    def _receive(self, message: Message) -> None:
        self._keep(message.sender, *message.body)
        self._channel.post(self._answer_topic, to=message.sender)

    def _receive_acknowledgement(self, message: Message) -> None:
        with self._news:
            self._acknowledged.add(message.sender)
            self._news.notify_all()

    def _keep(self, rank: int, step: int, fatal: bool, text: str) -> None:
        # One operation each under the interpreter's lock: the receiving thread and this one both come here.
        self._notices.setdefault(step, {})[rank] = (fatal, text)

    def _count(self, text: str) -> None:
        """Let rank 0 know that this rank split or skipped a batch."""
        self.recovered += 1
        self._channel.post(self._count_topic, text, to=0)


def _stop(*args: Any, **kwargs: Any) -> None:
    raise _TooLargeError


def _refuse_collective(*args: Any, **kwargs: Any) -> None:
    raise BatchSizeError(
        "training_step communicates (all_gather, reduce or broadcast), so its batch cannot be split on one rank:"
        " the other ranks call it once. Use on_oom='skip' or a smaller batch."
    )
