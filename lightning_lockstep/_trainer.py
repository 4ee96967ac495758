"""What a Trainer was given, and how its loops stand, if it does not say so itself."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_lockstep._lightning import MisconfigurationException, Trainer, TrainerFn, _AcceleratorConnector
from lightning_lockstep.errors import ConfigurationError


def calls_under_way(*functions: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yield the variables of each call of these functions in which the caller runs, the innermost first."""
    codes = [function.__code__ for function in functions]
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            yield frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]


def given_to_trainer(name: str) -> Any:
    """Return an argument of the Trainer under construction as the user gave it, or ``None`` without one."""
    # By the time a strategy is asked, the Trainer's connector has overwritten what it changed its mind about,
    # and the Trainer has not kept the others yet; an argument is left only in the call that received it.
    for variables in calls_under_way(_AcceleratorConnector.__init__, Trainer.__init__):
        # The Trainer's own call is that of a wrapper, which has only what was given.
        given = variables.get("kwargs", variables)
        if name in given:
            return given[name]
    return None


def weights_only_of_run(given: bool | None) -> bool | None:
    """Return ``weights_only`` as it was given to a strategy, or else to the run of the Trainer."""
    # Lightning forgets that of a run in which weights are loaded after setup.
    for variables in calls_under_way(Trainer._run) if given is None else ():
        return variables.get("weights_only")
    return given


def asks_for_training_loader(trainer: Any) -> bool:
    """Return whether the loader in hand is one of the fit loop's own, not one of a validation inside it."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING or not trainer.training:
        return False
    return trainer.train_dataloader is None or bool(trainer.fit_loop._should_reload_train_dl)


def divides_data(trainer: Any) -> bool:
    """Return whether each rank gets its share of a loader: by Lightning's sampler, or by a strategy of this package."""
    # The Trainer itself does not keep use_distributed_sampler.
    connector = trainer._accelerator_connector
    by_lightning = connector.use_distributed_sampler and connector.is_distributed
    return bool(by_lightning or getattr(trainer.strategy, "divides_loaders", False))


def ranks_at_start(trainer: Any) -> int:
    """Return how many ranks a run has begun with; fewer may be left of one that outlives its ranks."""
    strategy = trainer.strategy
    outlives = getattr(getattr(strategy, "startup", None), "outlives", False)
    return int(strategy.num_processes * strategy.num_nodes if outlives else trainer.world_size)


def limited_batches(trainer: Any, length: float) -> float:
    """Return how many training batches of a loader of that length an epoch has."""
    limit = trainer.limit_train_batches  # fast_dev_run and overfit_batches set it
    if isinstance(limit, int):
        return min(length, limit)
    return int(length * limit) if length < math.inf else length


class DropInConfigurationError(ConfigurationError, MisconfigurationException):
    """Bad arguments, which a program written for Lightning's class catches as ``MisconfigurationException``."""


@contextmanager
def faults_as_lightnings() -> Iterator[None]:
    """Raise a ``ConfigurationError`` of the body as one that Lightning's programs catch as well."""
    try:
        yield
    except ConfigurationError as error:
        raise DropInConfigurationError(error.faults) from None


@contextmanager
def weights_as_they_are(trainer: Any) -> Iterator[None]:
    """Have ``validate`` and ``test`` without a ``ckpt_path`` take the weights that the model has."""
    # Under Slurm Lightning loads the newest ``hpc_ckpt_<n>.ckpt`` of the run's folder instead.
    connector = trainer._checkpoint_connector
    connector._user_managed, connector._ckpt_path = True, None
    try:
        yield
    finally:
        connector._user_managed = False
