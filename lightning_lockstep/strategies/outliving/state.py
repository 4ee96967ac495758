"""The state of a run that goes on when a rank is lost: what each rank keeps of it, and the checkpoint made of that.

A rank keeps what a step changes before its optimizer does (buffers and random numbers), and what hooks change that run
again after a loss. When a member is lost, it puts that back and makes a checkpoint in memory; the most advanced member
gives its own to those that have not come as far.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_lockstep._lightning import (
    Callback,
    EarlyStopping,
    TrainerFn,
    TrainerStatus,
    convert_tensors_to_scalars,
)
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure.record import place_in_words
from lightning_lockstep.distributed.process_group import broadcast_tensors
from lightning_lockstep.loaders.loader_position import POSITION_KEY
from lightning_lockstep.loaders.weights import StepWeights
from lightning_lockstep.steps.patching import assigned, call_around
from lightning_lockstep.steps.snapshot import BufferCopies, ModuleAttributes, RandomState
from lightning_lockstep.strategies.outliving.log import LoggedRows, Losses, Row


@dataclass(frozen=True)
class Memory:
    """A checkpoint in memory, and what no checkpoint has."""

    checkpoint: dict[str, Any]
    progress: tuple[int, ...]  # comparable with that of other ranks
    at: str  # the same in words
    should_stop: bool
    rows: dict[Row, dict[str, Any]]  # that loggers were given last
    open_row: tuple[dict[str, Any], int] | None  # the row to be given to them next, and its step
    saves_again: bool  # whether callbacks that save after a batch are called again
    saved: list[Any]  # paths of checkpoints, which are saved again
    callbacks: list[dict[str, Any]]  # attributes of those that save or stop


@dataclass
class _Hooks:
    """Hooks that are running now; after a loss they run again."""

    where: Literal["", "batch", "validation", "epoch"] = ""  # after what; "": none is running
    put_back: list[Callable[[], object]] = field(default_factory=list)  # what they change
    saved: list[Any] = field(default_factory=list)  # paths of checkpoints


class RunState:
    """What one rank keeps of a call of a Trainer, so that it or another rank can go on from there."""

    def __init__(self, strategy: Any, losses: Losses) -> None:
        self.strategy: Any = strategy
        self.trainer: Any = None
        self.losses = losses
        self.rows = LoggedRows()
        self.memory: Memory | None = None  # until the run has begun from it
        self._in_run = False  # whether weights, optimizers and counters are those of the run
        self._followed: Any = None  # the Trainer whose batches, hooks and logs this follows
        self._at_begin = RandomState()  # of the call
        self._before_step = -1, self._at_begin  # its number, and the random states before it
        self._buffers: BufferCopies | None = None  # before the step
        self._hooks = _Hooks()
        self._values: list[ModuleAttributes] = []  # logged in this epoch
        call_around(strategy, optimizer_step=self._around_step, save_checkpoint=self._around_save)

    # -- while all is well --

    def begin_call(self, trainer: Any) -> None:
        self.trainer = trainer
        self._in_run = False
        self.memory = None
        self._at_begin = RandomState()
        self.rows.forget_written()

    def begin_run(self) -> None:
        """Keep what a loss needs from now on. Ranks: all, together; a broadcast."""
        trainer = self.trainer
        self.rows.go_on_in_one_place(trainer)
        self._buffers = BufferCopies(trainer.lightning_module, trusts_versions=False)
        if self._followed is trainer:
            return
        self._followed = trainer
        # Between these calls of Lightning's connector the hooks of all callbacks run.
        call_around(
            trainer._logger_connector,
            on_batch_start=self._around_batch_start,
            update_train_step_metrics=self._around_metrics,
            epoch_end_reached=self._around_epoch_end,
            update_train_epoch_metrics=self._around_metrics,
        )
        call_around(trainer.fit_loop.epoch_loop.val_loop, run=self._around_validation)
        self.rows.follow(trainer)

    def _around_batch_start(self, begin: Callable[..., None], *args: Any) -> None:
        """Keep what a step that is broken off has changed by then: buffers and random states."""
        begin(*args)
        self._mark_in_run()
        trainer = self.trainer
        if trainer.training and trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            assert self._buffers is not None
            self._buffers.refresh()
            self.rows.begin_step(trainer.global_step)
            self._before_step = trainer.global_step, RandomState()

    def _around_step(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        self._begin_hooks("batch")
        return result

    def _around_validation(self, run: Callable[[], Any]) -> Any:
        self._begin_hooks("validation")
        outputs = run()
        self._hooks = _Hooks()
        return outputs

    def _around_epoch_end(self, reached: Callable[[], None]) -> None:
        if self.trainer.training:
            self._begin_hooks("epoch")
        reached()

    def _begin_hooks(self, where: Literal["batch", "validation", "epoch"]) -> None:
        """Keep attributes of callbacks that save or stop, and for a validation metrics, before hooks change them."""
        self._mark_in_run()
        put_back: list[Callable[[], object]] = []
        for callback in filter(_decides, self.trainer.callbacks):
            attributes = {name: copy.copy(value) for name, value in vars(callback).items()}
            put_back.append(partial(vars(callback).update, attributes))
        if where == "validation":
            put_back += [ModuleAttributes(metric).restore for metric in self.strategy.counting.metrics()]
        self._hooks = _Hooks(where, put_back)

    def _around_metrics(self, update: Callable[[], None]) -> None:
        self._hooks = _Hooks()  # those of the batch, or of the epoch, have run
        update()

    def _around_save(self, save: Callable[..., None], checkpoint: Any, path: Any, **options: Any) -> None:
        if self._hooks.where:
            self._hooks.saved.append(path)
        save(checkpoint, path, **options)

    def _mark_in_run(self) -> None:
        """Note that the run has begun with a step or hooks: until then the state in memory is the one to go on from."""
        if not self._in_run:
            self._in_run = True
            self.memory = None
            self._values = []
        self.losses.tell()

    # -- when a member is lost --

    def share(self) -> None:
        """Have the most advanced member give its state to the others. Ranks: all members, together."""
        if self._in_run and self.trainer.state.fn == TrainerFn.FITTING:
            self.memory = self._dump()
        self._in_run = False
        self._hooks = _Hooks()
        own = (0,) if self.memory is None else self.memory.progress  # which begins with 1
        progress, fits = zip(*current_communicator().gather((own, StepWeights.fits)), strict=True)
        StepWeights.fits = max(fits)
        if len(set(progress)) > 1:
            state = None if self.memory is None else vars(self.memory)
            self.memory = Memory(**broadcast_state(progress.index(max(progress)), state))

    def _dump(self) -> Memory:
        """Return what this rank has finished. Ranks: any, alone; hooks run as after an error."""
        trainer, hooks, epoch_loop = self.trainer, self._hooks, self.trainer.fit_loop.epoch_loop
        open_row = self._open_row() if hooks.where == "batch" else None
        for put_back in hooks.put_back:
            put_back()
        if self._before_step[0] == trainer.global_step and self._buffers is not None:
            self._buffers.restore()
        self._values = [ModuleAttributes(one) for one in epoch_loop._results.values()]
        with assigned(trainer.state, status=TrainerStatus.INTERRUPTED):
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if (position := checkpoint.get(POSITION_KEY)) is not None:
            in_training = "epoch" if hooks.where == "epoch" else "step"
            position["broken_off"] = in_training if trainer.training else "validation"
            for record in position["ranks"]:
                monitored = trainer._logger_connector._callback_metrics.items()
                record["metrics"] = {name: torch.as_tensor(value).cpu() for name, value in monitored}
        at = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        return Memory(
            checkpoint,
            progress=self._progress(),
            at=place_in_words({**at, "stage": "validate"} if trainer.evaluating else at),
            should_stop=trainer.should_stop,
            rows=self.rows.last,
            open_row=open_row,
            saves_again=hooks.where == "batch",
            saved=hooks.saved,
            callbacks=[_plain(vars(one)) for one in filter(_decides, trainer.callbacks)],
        )

    def _open_row(self) -> tuple[dict[str, Any], int] | None:
        """Return the row that the loggers were to be given after the batch, and its step, if there is one."""
        trainer, connector = self.trainer, self.trainer._logger_connector
        if connector.should_update_logs:
            with suppress(Exception):  # of values that no step has logged yet
                logged = convert_tensors_to_scalars(connector.metrics["log"])
                row = {"epoch": trainer.current_epoch, **logged}
                return row, int(row.pop("step", trainer.fit_loop.epoch_loop._batches_that_stepped))
        return None

    def _progress(self) -> tuple[int, ...]:
        loop = self.trainer.fit_loop.epoch_loop
        epochs = self.trainer.fit_loop.epoch_progress.current
        batches = loop.batch_progress.total
        scheduled = loop.scheduler_progress.total.completed
        validated = loop.val_loop.batch_progress.total.completed
        done = epochs.processed, batches.processed, scheduled, batches.completed, validated
        return 1, self.trainer.global_step, *done, epochs.completed, loop._batches_that_stepped

    # -- as the call begins again --

    def put_back(self) -> None:
        """Put back what no checkpoint has, such as at which step callbacks have saved last. Ranks: each, alone."""
        memory, trainer = self.memory, self.trainer
        if memory is None:
            self._at_begin.restore()
            return
        trainer.should_stop = memory.should_stop
        for callback, values in zip(filter(_decides, trainer.callbacks), memory.callbacks, strict=False):
            vars(callback).update(values)
        for path in memory.saved:  # callbacks save these again, and would give them other names
            self.strategy.remove_checkpoint(path)
        self.rows.go_on(trainer, memory.rows, repeats_until=memory.progress[1])

    def finish_loading(self) -> None:
        """Go on with the random states of the step; save and log what was not when a member was lost."""
        if self.memory is None:
            return
        memory, trainer = self.memory, self.trainer
        step, states = self._before_step
        if step == trainer.global_step:
            states.restore()
        for values in self._values:
            values.restore()
        for callback in trainer.checkpoint_callbacks if memory.saves_again else ():
            number = trainer.fit_loop.epoch_loop.batch_idx
            callback.on_train_batch_end(trainer, self.strategy.lightning_module, None, None, number)
        if memory.open_row is not None:
            for logger in trainer.loggers:
                logger.log_metrics(*memory.open_row)
                logger.save()


def _decides(callback: Callback) -> bool:
    """Return whether a callback saves checkpoints or stops the fit."""
    return hasattr(callback, "_last_global_step_saved") or isinstance(callback, EarlyStopping)


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    kinds = bool, int, float, str, type(None)
    return {name: value for name, value in attributes.items() if isinstance(value, kinds)}


def broadcast_state(source: int, state: Any) -> Any:
    """Return the state of a rank. Ranks: all, together; a broadcast, and one for each tensor."""
    communicator = current_communicator()
    if communicator.rank == source:  # without a copy of its tensors
        shapes = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), state)
        communicator.broadcast(shapes, source)
    else:
        shapes = communicator.broadcast(None, source)
        state = pytree.tree_map_only(Tensor, lambda one: torch.empty_like(one, device="cpu"), shapes)
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    broadcast_tensors(tensors, source=source)
    return state
