"""StaticShapes: batches of the same shapes, so that nothing is compiled after the first steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm

from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from lightning_lockstep._settings import settings_of
from lightning_lockstep._text import say
from lightning_lockstep.batch_size.split_step import tensors_in
from lightning_lockstep.callbacks.auto_batch_size import AutoBatchSize
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.shapes.batches import Key, StaticShapesSettings, current, mean_of_real, real_samples
from lightning_lockstep.shapes.loaders import ShapedStages, batch_size_in_use, refuse_joined_batches, stage_of
from lightning_lockstep.steps.patching import put_in_place

_BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)


class StaticShapes(Callback):
    """Gives every batch of training, validation and test the same shapes, for ``torch.compile`` and torch-xla.

    A step that is compiled for 64 samples is compiled again for a last batch of 12, and again for each length of
    sequence. This leaves out or pads the last batch, pads sequences to a few lengths, and evaluates with the batch
    size of training.

    Padded samples must not count. A module whose batches are padded asks which samples are real, with
    :meth:`real_samples` or :meth:`mean`; one that does not is refused at its first batch. What it logs is
    weighted by the number of real samples. Prediction is unchanged.

    Args:
        last_batch: What to do with a last training batch that is not full. ``drop`` leaves it out, ``pad``
            fills it up with copies of its last sample, ``keep`` leaves it as it is.
        evaluation_last_batch: The same for validation and test; ``pad`` or ``keep``, as no sample may be left out.
        evaluation_at_training_size: Whether validation and test take as many samples at once as training, where the
            same samples are then evaluated: the loader drops none, and the Trainer does not limit its batches.
        fill_values: Values of added samples instead of a copy, by key of the batch (by position, where a batch
            is a list), such as ``{"labels": -100}``. With these, the loss and the metrics must ignore the added
            samples.
        sequence_lengths: Lengths to which sequences are padded, growing: each to the smallest that holds it.
        sequence_values: What they are padded with, by key of the batch, such as ``{"input_ids": 0, "labels": -100}``.
        sequence_dim: Dimension along which they are padded.

    Attributes:
        settings: The arguments.

    Raises:
        ConfigurationError: An argument cannot be used; the message lists every error. (On every rank, in a run:
            the data or the module does not allow what was asked for.)

    Ranks: add it on every rank. Each pads its own batches; one small gather when loaders are made.
    """

    real_samples = staticmethod(real_samples)
    mean = staticmethod(mean_of_real)

    def __init__(
        self,
        *,
        last_batch: Literal["drop", "pad", "keep"] = "drop",
        evaluation_last_batch: Literal["pad", "keep"] = "keep",
        evaluation_at_training_size: bool = True,
        fill_values: Mapping[Key, float] | None = None,
        sequence_lengths: Sequence[int] = (),
        sequence_values: Mapping[Key, float] | None = None,
        sequence_dim: int = 1,
    ) -> None:
        super().__init__()
        self.settings = settings_of(StaticShapesSettings, locals())
        self._stages = ShapedStages(self.settings)
        self._in_loop: set[str] = set()
        self._undo: list[Callable[[], None]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the place of two methods of the strategy. Ranks: all ranks; nothing is sent."""
        self._take_away()
        known = self._stages.training_size
        self._stages = ShapedStages(self.settings)
        if stage != "fit":
            self._stages.training_size = known  # a test after a fit is at its size, too
        else:
            self._refuse_what_divides_batches(trainer)
        strategy: Any = trainer.strategy
        process, move = strategy.process_dataloader, strategy.batch_to_device

        def process_dataloader(dataloader: object) -> object:
            return process(self._stages.loader_of_run(trainer, dataloader))

        def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            batch = self._batch(trainer, batch, dataloader_idx)
            return _with_mask(move(batch, device=device, dataloader_idx=dataloader_idx))

        self._undo = [
            put_in_place(strategy, "process_dataloader", process_dataloader),
            put_in_place(strategy, "batch_to_device", batch_to_device),
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on batches are those of the run; raises where padding is not possible. Ranks: all."""
        # Not at the start of an epoch, which Lightning leaves out where a run resumes in the middle of one.
        self._in_loop.add("training")
        self._stages.training_size = batch_size_in_use(trainer, "training", 0)
        if self.settings.last_batch != "pad":
            return
        refuse_joined_batches(trainer, "training", "last_batch")
        norms = [
            name
            for name, part in pl_module.named_modules()
            if isinstance(part, _BATCH_NORMS) and part.training
        ]
        if norms:
            raise ConfigurationError(
                f"StaticShapes(last_batch='pad') with batch normalisation ({', '.join(norms[:3])}): expected a module"
                " without, as its statistics would count the added samples. Give last_batch='drop'."
            )

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Let what is logged have the weight of the real samples. Ranks: any, alone."""
        if current.real is not None:
            results: Any = trainer._results
            if results is not None:  # the weight of what is logged without a batch_size
                results.batch_size = current.real

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Refuse a training step that does not ask which samples are real. Ranks: all ranks, at their first batch."""
        self._refuse_if_not_asked("training", "training_step", "last_batch")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As at its start. Ranks: any, alone."""
        self._in_loop.discard("training")

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As for training; the same for test."""
        stage = stage_of(trainer)
        self._in_loop.add(stage)
        if self.settings.pads(stage):
            refuse_joined_batches(trainer, stage, "evaluation_last_batch")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """As for training; the same for test."""
        stage = stage_of(trainer)
        self._refuse_if_not_asked(stage, f"{stage}_step", "evaluation_last_batch")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As for training; the same for test."""
        self._in_loop.discard(stage_of(trainer))
        current.forget()

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    on_validation_batch_start = on_test_batch_start = on_train_batch_start
    on_test_batch_end = on_validation_batch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind. Ranks: any, alone."""
        self._take_away()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo every change, and print on rank 0 what was added. Ranks: any; nothing is sent."""
        added = ", ".join(
            f"{count} in {stage}" for stage, count in sorted(self._stages.added.items()) if count
        )
        if added and trainer.is_global_zero:
            say(f"StaticShapes: samples added by rank 0 to fill up batches: {added}.")
        self._take_away()

    def _take_away(self) -> None:
        for put_back in reversed(self._undo):
            put_back()
        self._undo = []
        self._in_loop.clear()
        current.forget()

    def _refuse_what_divides_batches(self, trainer: Trainer) -> None:
        splits = any(
            isinstance(one, AutoBatchSize) and one.settings.on_oom == "split"
            for one in getattr(trainer, "callbacks", [])
        )
        if splits and self.settings.last_batch == "pad":
            raise ConfigurationError(
                "StaticShapes(last_batch='pad') with AutoBatchSize(on_oom='split'): expected one of them, as a batch"
                " that is split is not the one that was padded. Give last_batch='drop', or another on_oom."
            )

    def _refuse_if_not_asked(self, stage: str, step: str, option: str) -> None:
        if (
            current.mask is None
            or current.was_asked
            or self.settings.fill_values
            or stage not in self._in_loop
        ):
            return
        raise ConfigurationError(
            f"StaticShapes({option}='pad'): expected {step} to ask which samples are real, as the added ones would"
            " count in its loss and metrics. Take StaticShapes.mean(losses, batch) in the place of the mean, or"
            " StaticShapes.real_samples(batch). Or give fill_values such as {'labels': -100}, if loss and metrics pass"
            f" over that value, or {'drop' if stage == 'training' else 'keep'!r} instead of 'pad'."
        )

    def _batch(self, trainer: Trainer, batch: Any, dataloader_idx: int) -> Any:
        stage = stage_of(trainer)
        if stage not in self._in_loop:
            current.forget()
            return batch
        size = batch_size_in_use(trainer, stage, dataloader_idx)
        return self._stages.shaped(stage, batch, dataloader_idx, size)


def _with_mask(batch: Any) -> Any:
    """Put the mask of a batch next to it, on its device."""
    tensors = tensors_in(batch)
    if current.mask is not None and tensors:
        current.mask = current.mask.to(tensors[0].device)
    return batch
