"""RecompileMonitor: which steps had to compile, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep.shapes.loaders import batch_size_in_use, stage_of
from lightning_lockstep.shapes.recompilation import (
    Compilation,
    CompiledStep,
    DynamoCompilations,
    StepCompilations,
    XLACompilations,
    shapes_of,
)
from lightning_lockstep.steps.capabilities import RunsLater

_log = logging.getLogger(__name__)


class RecompileMonitor(Callback):
    """Reports each step after the first ones that had to compile, and why: which shapes, or what else.

    Compilations are those of ``torch.compile`` on any device, with its own reasons, and those of torch-xla. The
    first batches of training, validation, test and prediction are expected to compile. A batch with other
    shapes, most often the last one of a loader, compiles again; the same number of samples in every batch
    (``drop_last=True``) and sequences padded to a few lengths avoid that.

    Args:
        expected_batches: How many first batches of each stage may compile without a warning; in training that many for
            each batch of ``accumulate_grad_batches``.

    Attributes:
        steps: Every batch in which something was compiled.

    Raises:
        ConfigurationError: ``expected_batches`` cannot be used.

    Ranks: add it on every rank; each watches its own process, and nothing is sent. Under a strategy that runs
        operations later (XLA), pending ones are started at the beginning and at the end of each batch, so that
        each compilation belongs to a known batch. Rank 0 reports all compilations, other ranks only the
        unexpected ones.
    """

    def __init__(self, *, expected_batches: int = 2) -> None:
        super().__init__()
        faults = Faults()
        faults.whole("expected_batches", expected_batches, what="a whole number of batches", such_as=2)
        faults.raise_all()
        self.expected_batches = expected_batches
        self._begin()

    def _begin(self) -> None:
        self._sources: list[DynamoCompilations | XLACompilations] = []
        self._found = StepCompilations(self.expected_batches)
        self._compared: set[str] = set()

    @property
    def steps(self) -> Sequence[CompiledStep]:
        """Every batch in which something was compiled."""
        return tuple(self._found.steps)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start a new record."""
        self._begin()
        self._sources = [DynamoCompilations()]
        if trainer.strategy.root_device.type == "xla":
            self._sources.append(XLACompilations())

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note what was compiled outside of batches. Ranks: any, alone; under XLA every rank."""
        self._found.outside += self._take_of(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note what this batch has compiled. Ranks: any, alone; under XLA every rank."""
        stage = stage_of(trainer)
        if stage != "training":
            self._compare(trainer, stage, batch, dataloader_idx)
        self._batch_done(trainer, stage, batch, batch_idx)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print on rank 0 how much was compiled in total. Ranks: any; nothing is sent."""
        self._found.outside += self._take()  # what is pending may wait for a rank that has failed
        if (self._found.steps or self._found.outside) and trainer.is_global_zero:
            say(f"RecompileMonitor: {self._found.summary()}.")
        self._sources = []

    def _take(self) -> list[Compilation]:
        return [one for source in self._sources for one in source.take()]

    def _take_of(self, trainer: Trainer) -> list[Compilation]:
        """Return what was compiled up to here, also of what was called and would be compiled later only."""
        if isinstance(trainer.strategy, RunsLater):
            trainer.strategy.sync()
        return self._take()

    def _batch_done(self, trainer: Trainer, stage: str, batch: Any, batch_idx: int) -> None:
        found = self._found.batch_done(
            stage,
            batch_idx,
            trainer.global_step,
            shapes_of(batch),
            self._take_of(trainer),
            accumulated=trainer.accumulate_grad_batches if stage == "training" else 1,
        )
        if found is None:
            return
        if not found.is_expected:
            who = "" if trainer.is_global_zero else f" rank {trainer.global_rank}:"
            _log.warning("RecompileMonitor:%s %s", who, found.line())
        elif trainer.is_global_zero:
            say(f"RecompileMonitor: {found.line()}")

    def _compare(self, trainer: Trainer, stage: str, batch: Any, dataloader_idx: int) -> None:
        """Say once if the batches of evaluation have another size than those of training."""
        trained, here = self._found.first_shapes("training"), shapes_of(batch)
        if stage in self._compared or not trained or not here or not trainer.is_global_zero:
            return
        self._compared.add(stage)
        sizes = {shape[0] for shape in (trained[0], here[0]) if shape}
        # The only batch of a small loader may be not full; the loader's size is then that of training all the same.
        if len(sizes) > 1 and batch_size_in_use(trainer, stage, dataloader_idx) != trained[0][0]:
            _log.warning(
                "RecompileMonitor: %s takes %d samples at once, training %d. The same number lets both use what was"
                " compiled for it: StaticShapes(evaluation_at_training_size=True).",
                stage,
                here[0][0],
                trained[0][0],
            )
