"""With what a run cannot outlive a rank, refused before any rank starts if it is known; the global batch afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal

from lightning_lockstep._lightning import (
    GradientAccumulationScheduler,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning_lockstep._registry import public
from lightning_lockstep._settings import Faults
from lightning_lockstep._trainer import (
    asks_for_training_loader,
    given_to_trainer,
    limited_batches,
    ranks_at_start,
)
from lightning_lockstep.launchers.environments import LockstepEnvironment, MPIEnvironment
from lightning_lockstep.loaders.global_order import asked_sampler, bounds, kind_of, micro_batches, parts_of
from lightning_lockstep.steps.patching import replaced

_STARTERS = {
    TorchElasticEnvironment: "torchrun",
    MPIEnvironment: "mpirun",
    SLURMEnvironment: "several tasks of srun",
    LSFEnvironment: "jsrun",
}
_EXPECTED = {
    "starter": "one process on each host (`srun --ntasks-per-node=1`), which starts its ranks and sees which ends",
    "start_method": "'popen', because only a script can begin anew",
    "device": "accelerator='cpu', because a step that a GPU has queued behind a broken reduction may run",
    "sampler": "True, because what your own division has given to a lost rank is not known",
    "averaging": "none, because the ranks then have different weights",
    "uneven_inputs": "'error', because the ranks that are left divide all samples anew",
    "hook": "another one, because PowerSGD keeps on each rank what it has not sent",
    "manual": "automatic_optimization=True, because it is not known which of several steps were made",
    "batches": "a number of epochs, because batches are counted anew after a loss",
    "divides": "a fixed number of micro-batches (EffectiveBatchSize), because a loss divides them anew",
    "LBFGS": "an optimizer that steps once in a batch, because LBFGS makes several",
    "ZeroRedundancyOptimizer": "the optimizer itself, because each rank has a part of its state alone",
    "loader": "a DataLoader of data with indices that this package divides, so that others take its samples",
}


def _refuse(**found: str | Literal[False]) -> None:
    """Raise one error with all that was found, each with what is expected instead."""
    faults = Faults()
    for kind, name in found.items():
        if name:
            faults.add(f"{name} with on_lost_rank='continue': expected {_EXPECTED[kind]}.")
    faults.raise_all()


def check_start(strategy: Any) -> None:
    """Raise if the ranks are started in a way that ends all with the first, or an option needs all of them."""
    environment, settings = strategy.cluster_environment, strategy.settings
    method, device = settings.start_method, strategy.root_device.type
    own = f"a {type(environment).__name__}"
    starter = next((name for kind, name in _STARTERS.items() if isinstance(environment, kind)), own)
    is_ours = isinstance(environment, LockstepEnvironment)
    if is_ours:
        environment.validate_settings(strategy.num_processes, strategy.num_nodes)
    divides = given_to_trainer("use_distributed_sampler")
    _refuse(
        starter=not is_ours and starter,
        device=is_ours and device != "cpu" and f"devices of type {device}",
        sampler=divides is False and "use_distributed_sampler=False",
        averaging=bool(strategy._model_averaging_period) and "model_averaging_period",
        start_method=method != "popen" and f"start_method={method!r}",
        uneven_inputs=settings.uneven_inputs == "join" and "uneven_inputs='join'",
        hook=settings.ddp_comm_hook == "power_sgd" and "ddp_comm_hook='power_sgd'",
    )


def check_fit(trainer: Any) -> None:
    """Raise if model or callbacks of a fit cannot go on in the middle."""
    module, kinds = trainer.lightning_module, (GradientAccumulationScheduler, public("AutoBatchSize"))
    is_manual = module is not None and not module.automatic_optimization
    by_batches = trainer.check_val_every_n_epoch is None and isinstance(trainer.val_check_interval, int)
    divides = (kind.__name__ for kind in kinds if any(isinstance(one, kind) for one in trainer.callbacks))
    _refuse(
        manual=is_manual and "manual optimization",
        batches=by_batches and "check_val_every_n_epoch=None",
        divides=" and ".join(divides),
    )


def check_optimizers(optimizers: Iterable[Any]) -> None:
    """Raise, on all ranks, if a rank alone cannot go on with an optimizer. Ranks: all."""
    kinds = {kind.__name__ for optimizer in optimizers for kind in type(optimizer).__mro__}
    _refuse(**{name: name for name in ("LBFGS", "ZeroRedundancyOptimizer") if name in kinds})


def check_loader(loader: Any) -> None:
    """Raise, on all ranks, if a training loader is not divided here. Ranks: all."""
    _refuse(loader=kind_of(loader) is None and f"a {type(loader).__name__} that is not divided here")


# -- The global batch of a run stays that of its start when ranks are lost: who is left makes more micro-batches --


class GlobalBatch:
    """Divides the global batch of the start among the ranks that are left."""

    # In more micro-batches rather than in larger ones, so that memory does not grow. If batch norm follows the
    # micro-batch, that stays as it was.

    def __init__(self, strategy: Any) -> None:
        self.strategy: Any = strategy
        self.trainer: Any = None
        self._changed = ExitStack()  # settings of the Trainer

    def process(self, process: Callable[[Any], Any], loader: Any) -> Any:
        """Give this rank its part of a loader. Ranks: all; see ``process_dataloader`` of the strategy."""
        if not asks_for_training_loader(self.trainer):
            return process(loader)
        check_loader(loader)
        strategy, accumulated = self.strategy, self.trainer.accumulate_grad_batches
        started, ranks = ranks_at_start(self.trainer), strategy.world_size
        if ranks == started:
            return process(loader)
        unit = asked_sampler(loader.batch_sampler).batch_size if kind_of(loader) == "samples" else 1
        strategy.micro_batches = sizes = strategy.micro_batches or (unit * started,)
        if strategy.settings.batch_norm != "of_rank":
            return process(loader)
        largest, total = -(-max(sizes) // started), sum(sizes) * accumulated // len(sizes)
        strategy.micro_batches = micro_batches(total, -(-total // (ranks * largest)))
        self._set(accumulate_grad_batches=len(strategy.micro_batches))
        part = process(loader)
        parts, every = parts_of(part), self.trainer.val_check_interval
        # An epoch ends, and validations come, after as many samples as at the start.
        at_start, count = len(bounds(parts.position(len(parts)), sizes)) - 1, len(strategy.micro_batches)
        limited = limited_batches(self.trainer, at_start)
        if limited < at_start:
            self._set(limit_train_batches=int(limited * count // accumulated))
        if isinstance(every, (int, float)):  # else it is by the clock
            number = every if isinstance(every, int) else max(1, int(limited * every))
            self._set(val_check_interval=1.0 if number >= limited else int(number * count // accumulated))
        return part

    def _set(self, **values: Any) -> None:
        self._changed.enter_context(replaced(self.trainer, **values))

    def put_back(self) -> None:
        """Give the Trainer its own settings back."""
        self._changed.close()
