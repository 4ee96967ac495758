"""How a rank goes on when a member of its run is lost.

A loss shows as a broken collective or at a step boundary, so a rank knows how far it has come. What it repeats:

================================== ==================================================================================
a member was lost                  what the others do again
================================== ==================================================================================
before the first step              all, from the beginning of the call
in a step                          the optimizer step, with buffers and random states as they were before it
after the step, such as in a save  what callbacks save then, and what is logged
in a validation                    that validation, with its metrics and with what saves or stops as before
at the end of an epoch             that end, likewise
================================== ==================================================================================

On each of them, in this order::

    leave        drops what holds the broken process group; those that are left connect
    share_state  the most advanced member gives its state, a checkpoint in memory, to those that have not come as far;
                 who was lost is noted; the Trainer is brought back to where its function can be called again
    (the call)   the Trainer sets itself up again, and loads the checkpoint in memory as any other (`_around_load`);
                 what is in no checkpoint is put back, what was not saved and logged is (`_around_train_start`)
    (a step)     the run goes on: who was lost is told
"""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning_lockstep._lightning import TrainerFn, TrainerStatus
from lightning_lockstep.distributed.failure.members import Membership
from lightning_lockstep.steps.patching import call_around
from lightning_lockstep.strategies.outliving.can_outlive import GlobalBatch, check_optimizers
from lightning_lockstep.strategies.outliving.log import Losses
from lightning_lockstep.strategies.outliving.state import RunState

#: In place of the path of a checkpoint.
IN_MEMORY = "the memory of the ranks"


class Recovery:
    """What one rank does about losses in the calls of a Trainer."""

    def __init__(self, strategy: Any, membership: Membership) -> None:
        self.strategy, self.membership = strategy, membership
        self.trainer: Any = None
        self._batch = GlobalBatch(strategy)
        self._losses = Losses(strategy, membership)
        self._state = RunState(strategy, self._losses)
        call_around(
            strategy,
            process_dataloader=self._batch.process,
            barrier=self._around_barrier,
            load_checkpoint=self._around_load,
            on_train_start=self._around_train_start,
        )

    # -- a call of a Trainer --

    def begin_call(self, trainer: Any) -> None:
        self.trainer = self._batch.trainer = trainer
        self._state.begin_call(trainer)

    def end_call(self) -> None:
        """Give the Trainer its own settings back, and let another call log what comes again in it."""
        self._batch.put_back()
        self._state.rows.forget_written()

    def _around_barrier(self, wait: Callable[..., None], name: str | None = None, **options: Any) -> None:
        self.strategy.check_failure()  # without this, a rank would go on where others have broken off
        wait(name, **options)
        if name == "run-stage":  # all ranks have the state of the run
            self.strategy.supervisor.in_batches = True
            check_optimizers(self.trainer.optimizers)
            self._losses.forget_earlier_run()
            self._state.begin_run()

    # -- when a member is lost --

    def leave(self) -> None:
        """Let go of DDP, whose reducer holds the process group. Ranks: any, alone."""
        wrapped = None if self.strategy.model is None else weakref.ref(self.strategy.model)
        self.strategy.model = module = self.strategy.lightning_module
        if wrapped is not None and wrapped() not in (None, module):
            gc.collect()  # its hooks would fire in the next backward

    def share_state(self, call: inspect.BoundArguments) -> None:
        """Make all members go on where the most advanced one is. Ranks: all members, together."""
        self._state.share()
        memory = self._state.memory
        where = f"in {self.trainer.state.fn.value}" if memory is None else f"at {memory.at}"
        self._losses.note(where, is_step=memory is not None)
        if self.membership.current.number:
            self._reset_trainer()
        self._state.put_back()
        if memory is not None:
            call.arguments["ckpt_path"] = IN_MEMORY

    def _reset_trainer(self) -> None:
        """Bring the Trainer back to where its function can be called again."""
        trainer, module = self.trainer, self.strategy.lightning_module
        fits = trainer.state.fn == TrainerFn.FITTING
        loop: Any = trainer.fit_loop.epoch_loop.val_loop if fits else trainer._active_loop
        if not trainer.training and hasattr(loop, "_module_mode"):
            with suppress(Exception):  # the loop had not begun
                loop._module_mode.restore(module)
        # Lightning's redirection of `forward`, which nobody has undone if DDP's own part of the forward has raised.
        vars(module).pop("forward", None)
        module.zero_grad(set_to_none=True)
        if fits:
            trainer.training = True
            loop._has_run = False  # else Lightning takes the validation of the epoch for done
        trainer._teardown()
        trainer.state.status = TrainerStatus.RUNNING
        if hasattr(loop, "_results"):
            loop._results.reset()
        if trainer.is_global_zero and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.enable()
        self.end_call()

    def _around_load(self, load: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        if path != IN_MEMORY:
            return load(path, *args, **options)
        assert self._state.memory is not None
        checkpoint = self._state.memory.checkpoint
        return {**checkpoint, "loops": copy.deepcopy(checkpoint["loops"])}  # which Lightning changes

    def _around_train_start(self, start: Callable[[], None]) -> None:
        start()
        self._state.finish_loading()
