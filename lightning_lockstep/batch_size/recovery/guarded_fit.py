"""The guard around the training steps of a fit, put in place and taken away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.batch_size.recovery.guarded_step import GuardedOptimization
from lightning_lockstep.batch_size.recovery.recover import Recovery
from lightning_lockstep.batch_size.refused import SearchRefusedError
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.ddp.reducer import why_not_resumable
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.engines import HasEngineTrials

__all__ = ["guard_fit", "refuse_engine", "unguard_fit"]


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
