"""Lightning's Tuner, for any number of ranks."""

from __future__ import annotations

from typing import Any, Literal

from lightning_lockstep._doors.lightning import (
    BatchSizeFinder,
    LightningDataModule,
    LightningModule,
    Tuner,
    _MultiProcessingLauncher,
)
from lightning_lockstep._doors.lightning_internals import faults_as_lightnings, search_only
from lightning_lockstep._settings import Faults
from lightning_lockstep.callbacks.auto_batch_size import AutoBatchSize

__all__ = ["LockstepTuner"]

_METHODS = ("fit", "validate", "test", "predict")


class LockstepTuner(Tuner):
    """Lightning's ``Tuner``, whose ``scale_batch_size`` searches with :class:`AutoBatchSize`, on any number of ranks.

    ``lr_find`` is Lightning's own.

    Args:
        trainer: The Trainer.

    Source: https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.tuner.tuning.Tuner.html

    Ranks: make it on every rank.

    Example:
        >>> tuner = LockstepTuner(trainer)
        >>> tuner.scale_batch_size(module, datamodule=data)
        >>> trainer.fit(module, datamodule=data)
    """

    def scale_batch_size(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        method: Literal["fit", "validate", "test", "predict"] = "fit",
        mode: str = "model",
        *args: Any,
        **settings: Any,
    ) -> int | None:
        """Search for a batch size, and start no run afterwards.

        The attributes of the module and the data module hold the size afterwards. Loaders that were passed are left
        alone: make new ones with what is returned.

        Args:
            model: The module.
            train_dataloaders: For ``fit``, where the module or the data module makes none.
            val_dataloaders: Likewise.
            dataloaders: For the other methods, likewise.
            datamodule: The data module.
            method: The loop in which the size is to fit.
            mode: How to search; this and what follows are arguments of :class:`AutoBatchSize`.
            *args: ``steps_per_trial`` to ``max_val``, in its order, which is Lightning's.
            **settings: Any of its arguments.

        Returns:
            The batch size per rank, or ``None`` under ``fast_dev_run``.

        Raises:
            ConfigurationError: An argument cannot be used; the message lists every error. It is a
                ``MisconfigurationException`` too.
            BatchSizeError: As :class:`AutoBatchSize`.

        Ranks: all, together.
        """
        trainer: Any = self._trainer
        finder = AutoBatchSize(mode, *args, **settings)  # type: ignore[arg-type]
        with faults_as_lightnings():
            _check(trainer, method, fit=(train_dataloaders, val_dataloaders), others=dataloaders, mode=mode)
        search_only(finder)
        trainer.callbacks = [finder, *trainer.callbacks]
        loaders = (train_dataloaders, val_dataloaders) if method == "fit" else (dataloaders,)
        modes = {each: each.training for each in model.modules()}
        try:
            getattr(trainer, method)(model, *loaders, datamodule=datamodule)
        finally:
            # A loop that is left before its first batch leaves the modules in the mode of evaluation.
            for each, training in modes.items():
                each.training = training
            trainer.callbacks = [each for each in trainer.callbacks if each is not finder]
        return finder.optimal_batch_size


def _check(trainer: Any, method: str, *, fit: tuple[Any, Any], others: Any, mode: str) -> None:
    faults = Faults("scale_batch_size")
    faults.choice("method", method, _METHODS)
    faults.check(mode != "off", "mode", mode, "a way to search: 'model', 'binsearch' or 'power'")
    if method == "fit" and others is not None:
        faults.add("dataloaders is not for method='fit': expected train_dataloaders and val_dataloaders.")
    if method != "fit" and any(each is not None for each in fit):
        faults.add(
            f"train_dataloaders and val_dataloaders are not for method={method!r}: expected dataloaders."
        )
    if any(isinstance(each, BatchSizeFinder) for each in trainer.callbacks):
        faults.add("the Trainer has a callback that searches already: expected none. Remove one of the two.")
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        faults.add(
            f"strategy={type(trainer.strategy).__name__} starts ranks inside the Trainer, and what is set there is lost"
            " with them: expected ranks that run the whole program (strategy='lockstep_ddp'), or an AutoBatchSize"
            " among the callbacks of the run."
        )
    faults.raise_all()
