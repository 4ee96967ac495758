"""With what a run cannot outlive a rank, why, and what to use: refused before any rank starts, where that is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_lockstep._lightning import (
    GradientAccumulationScheduler,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning_lockstep._registry import public
from lightning_lockstep._settings import Faults
from lightning_lockstep._trainer import given_to_trainer
from lightning_lockstep.launchers.environments import LockstepEnvironment, MPIEnvironment
from lightning_lockstep.loaders.global_order import kind_of

_ASKED = "on_lost_rank='continue'"


def _raise(refused: Iterable[tuple[bool, str, str]]) -> None:
    """Raise one error with all that is refused: whether it is there, its name, what is expected and why."""
    faults = Faults()
    for is_there, name, expected in refused:
        if is_there:
            faults.add(f"{name} with {_ASKED}: expected {expected}.")
    faults.raise_all()


def check_start(strategy: Any) -> None:
    """Raise if the ranks are started in a way that ends all with the first, or an option needs all of them."""
    environment, settings = strategy.cluster_environment, strategy.settings
    method, device = settings.start_method, strategy.root_device.type
    starters = (
        (TorchElasticEnvironment, "torchrun"),
        (MPIEnvironment, "mpirun"),
        (SLURMEnvironment, "several tasks of srun"),
        (LSFEnvironment, "jsrun"),
    )
    own = f"a {type(environment).__name__}"
    starter = next((name for kind, name in starters if isinstance(environment, kind)), own)
    is_ours = isinstance(environment, LockstepEnvironment)
    _raise(
        (
            (
                not is_ours,
                starter,
                "one process on one host, which starts the ranks itself and sees which of them ends",
            ),
            (
                strategy.num_nodes > 1,
                f"num_nodes={strategy.num_nodes}",
                "1, because nobody sees who is lost elsewhere",
            ),
            (
                is_ours and device != "cpu",
                f"devices of type {device}",
                "accelerator='cpu', because an optimizer step that a GPU has queued behind a broken reduction may run",
            ),
            (
                given_to_trainer("use_distributed_sampler") is False,
                "use_distributed_sampler=False",
                "True, because what your own division has given to a lost rank is not known",
            ),
            (
                bool(strategy._model_averaging_period),
                "model_averaging_period",
                "none, because the ranks then have different weights",
            ),
            (method != "popen", f"start_method={method!r}", "'popen', because only a script can begin anew"),
            (
                settings.uneven_inputs == "join",
                "uneven_inputs='join'",
                "'error', because the ranks that are left divide all samples anew",
            ),
            (
                settings.ddp_comm_hook == "power_sgd",
                "ddp_comm_hook='power_sgd'",
                "another one, because PowerSGD keeps on each rank what it has not sent",
            ),
        )
    )


def check_fit(trainer: Any) -> None:
    """Raise if model or callbacks of a fit cannot go on in the middle."""
    module, callbacks = trainer.lightning_module, trainer.callbacks
    divides = (
        "a fixed number of micro-batches (EffectiveBatchSize), because they are divided anew after a loss"
    )
    kinds = GradientAccumulationScheduler, public("AutoBatchSize")
    _raise(
        (
            (
                module is not None and not module.automatic_optimization,
                "manual optimization",
                "automatic_optimization=True, because it is not known which of several steps were made",
            ),
            (
                trainer.check_val_every_n_epoch is None and isinstance(trainer.val_check_interval, int),
                "check_val_every_n_epoch=None",
                "a number of epochs, because batches are counted anew after a loss",
            ),
            *((any(isinstance(one, kind) for one in callbacks), kind.__name__, divides) for kind in kinds),
        )
    )


def check_optimizers(optimizers: Iterable[Any]) -> None:
    """Raise, on all ranks, if a rank alone cannot go on with an optimizer. Ranks: all."""
    kinds = {kind.__name__ for optimizer in optimizers for kind in type(optimizer).__mro__}
    lbfgs = "an optimizer that steps once in a batch, because LBFGS makes several"
    zero = "the optimizer itself, because each rank has a part of its state alone"
    _raise((name in kinds, name, why) for name, why in (("LBFGS", lbfgs), ("ZeroRedundancyOptimizer", zero)))


def check_loader(loader: Any) -> None:
    """Raise, on all ranks, if a training loader is not divided here. Ranks: all."""
    why = "a DataLoader of data with indices that this package divides, so that others take a lost rank's samples"
    _raise([(kind_of(loader) is None, f"a {type(loader).__name__} that is not divided here", why)])
