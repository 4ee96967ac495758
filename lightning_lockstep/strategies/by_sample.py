"""The options ``random_numbers`` and ``batch_norm``: what numbers and norms of a training step follow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_lockstep._lightning import Strategy
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.loaders.global_order import GlobalBatches, parts_of, seed_of_run
from lightning_lockstep.loaders.weights import StepWeights, samples_in
from lightning_lockstep.steps.sample_numbers import BatchPlace, SampleNumbers
from lightning_lockstep.strategies.options import LifecycleSettings

StepPlace = tuple[BatchPlace, int, bool]  # the optimizer step, and whether the batch counts


class BySample(Strategy):
    """What strategies with one process per device do about these options."""

    settings: LifecycleSettings
    weights: StepWeights
    sample_numbers: SampleNumbers | None
    world_size: int

    def is_padding_batch(self) -> bool:
        """Return whether this rank's current training batch is a padding batch."""
        raise NotImplementedError

    def begin_numbers(self, *, fits: bool) -> None:
        """Begin the random numbers and norms of a fit, if they are not those of the rank."""
        by_sample, norm = self.draws_by_sample, self.settings.batch_norm == "of_batch" and self.world_size > 1
        self.sample_numbers = None
        if fits and (by_sample or norm):
            self.sample_numbers = SampleNumbers(seed_of_run(), numbers=by_sample, norm=norm)

    @property
    def draws_by_sample(self) -> bool:
        """Whether each sample has random numbers of its own."""
        return self.settings.random_numbers == "of_sample"

    def on_train_start(self) -> None:
        """Raise, on all ranks, if samples have no positions of their own in the epoch."""
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        loaders = trainer.fit_loop._combined_loader.flattened
        are_divided = [isinstance(parts_of(one), GlobalBatches) for one in loaders]
        if self.draws_by_sample and are_divided != [True]:
            given = f"{len(loaders)} training loaders"
            if not all(are_divided):
                given = "a training loader that is not divided among the ranks"
            raise ConfigurationError(
                f"random_numbers='of_sample' with {given}: expected one DataLoader of a data set with indices, whose"
                " sampler does not divide it, because a sample has its numbers by its position in the epoch."
            )
        super().on_train_start()

    @property
    def needs_loss(self) -> str:
        """Why every rank's step must return a loss; empty if a step without one contributes zero gradients."""
        if self.settings.batch_norm == "of_rank" or self.world_size == 1:
            return ""
        return "the ranks wait for each other in each batch norm with batch_norm='of_batch'"

    def place_of(self, batch: Any) -> StepPlace | None:
        """Return what the random numbers and norms of a step with this batch follow; ``None`` if the rank's own."""
        if self.sample_numbers is None or self.lightning_module is None:
            return None
        trainer: Any = self.lightning_module.trainer
        is_padding, combined = self.is_padding_batch(), trainer.fit_loop._combined_loader
        parts = None if combined is None else parts_of(combined.flattened[0])
        if not self.draws_by_sample or not isinstance(parts, GlobalBatches):
            place = BatchPlace(0, 0, 0, 1, samples_in(batch) if self.draws_by_sample else 1)
        else:
            place = parts.place(trainer.fit_loop.epoch_loop.batch_idx)
            if self.weights.is_apart or not parts.sizes_known or (is_padding and parts.kind != "samples"):
                place = place._replace(samples=samples_in(batch))
        return place, trainer.global_step, not is_padding

    def drawing_at(self, place: StepPlace | None) -> AbstractContextManager[None]:
        """Return the context of a step whose random numbers and norms follow this."""
        if place is None or self.sample_numbers is None:
            return nullcontext()
        return self.sample_numbers.step(*place, self.root_device)

    @property
    def global_norms(self) -> tuple[type[torch.nn.Module], ...]:
        """Modules whose running statistics are those of the global batch, on a rank with padding too."""
        norms = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d
        return norms if self.settings.batch_norm == "of_batch" else ()
