"""To what each batch of a run is padded: by what its loader says or has given so far."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.static_shapes.batches import (
    longest_sequence,
    missing_keys,
    padded_samples,
    padded_sequences,
    samples_in,
)
from lightning_lockstep.static_shapes.real_samples import current
from lightning_lockstep.static_shapes.settings import StaticShapesSettings

__all__ = ["ShapedStages"]

_log = logging.getLogger(__name__)


class ShapedStages:
    """Gives the batches of training, validation and test the shapes that the settings ask for."""

    def __init__(self, settings: StaticShapesSettings) -> None:
        self._settings = settings
        self._fill = dict(settings.fill_values or {})
        self._sequences = dict(settings.sequence_values or {})
        self._largest: Counter[tuple[str, int]] = Counter()
        self._looked_at: set[str] = set()
        self.training_size: int | None = None  # samples of a training batch, once asked; None: not known
        self.announced: set[str] = set()  # what was said of other sizes of batches
        self.added: Counter[str] = Counter()  # samples, by stage

    def shaped(self, stage: str, batch: Any, dataloader_idx: int, size: int | None) -> Any:
        """Return a batch in the shapes of its stage, and note how many of its samples are real."""
        current.forget()
        self._look(stage, batch)
        if self._sequences:
            self._warn_if_long(batch)
            batch = padded_sequences(
                batch, self._settings.sequence_lengths, self._sequences, self._settings.sequence_dim
            )
        if self._settings.pads(stage):
            batch = self._padded(stage, batch, dataloader_idx, size)
        return batch

    def _padded(self, stage: str, batch: Any, dataloader_idx: int, size: int | None) -> Any:
        real, place = samples_in(batch), (stage, dataloader_idx)
        if not real:
            return batch
        self._largest[place] = max(self._largest[place], real)
        size = max(self._largest[place] if size is None else size, real)
        current.real = real if size > real else None
        current.mask = torch.arange(size) < real
        self.added[stage] += size - real
        return padded_samples(batch, size, self._fill)

    def _look(self, stage: str, batch: Any) -> None:
        """Refuse keys that the first batch of training does not have; evaluation may have fewer."""
        if stage != "training" or stage in self._looked_at:
            return
        self._looked_at.add(stage)
        for name, values in (("fill_values", self._fill), ("sequence_values", self._sequences)):
            missing = missing_keys(batch, list(values))
            if missing:
                raise ConfigurationError(
                    f"{name} has {', '.join(map(repr, missing))}: expected keys of the batches (positions, where a"
                    f" batch is a list). The first batch of training is {_described(batch)}."
                )

    def _warn_if_long(self, batch: Any) -> None:
        most = self._settings.sequence_lengths[-1]
        longest = longest_sequence(batch, self._sequences, self._settings.sequence_dim)
        if longest > most and "long" not in self._looked_at:
            self._looked_at.add("long")
            _log.warning(
                "StaticShapes: a sequence of %d is longer than the largest of sequence_lengths, %d. It is not padded,"
                " and is compiled separately; add a length of at least %d.",
                longest,
                most,
                longest,
            )


def _described(batch: Any) -> str:
    if hasattr(batch, "keys"):
        return f"a {type(batch).__name__} with the keys {', '.join(map(repr, batch.keys()))}"
    if isinstance(batch, (list, tuple)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"
