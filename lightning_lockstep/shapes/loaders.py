"""The loaders of a run that gives batches of the same shapes, stage by stage."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_lockstep._lightning import CombinedLoader, Trainer, TrainerFn
from lightning_lockstep._text import say
from lightning_lockstep.batch_size.loaders import with_batch_size
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.shapes.batches import (
    StaticShapesSettings,
    current,
    longest_sequence,
    missing_keys,
    padded_samples,
    padded_sequences,
    samples_in,
)

_log = logging.getLogger(__name__)

# -- Loaders whose batches have all the same size, where the loader can give them --


def size_of(loader: Any) -> int | None:
    """Return how many samples the batches of a loader have, or ``None`` where it does not say."""
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None


def fault_of_dropping(loader: Any) -> str | None:
    """Return why a loader cannot leave out its last batch, or ``None`` if it can."""
    if not isinstance(loader, DataLoader):
        return (
            f"last_batch='drop' with a {type(loader).__name__}: expected a DataLoader, which can leave it out"
        )
    if not _is_plain(loader):
        kind = type(loader.batch_sampler).__name__
        return (
            f"last_batch='drop' with its own batch sampler ({kind}): expected one of torch, which can leave it"
            " out. Let your sampler do it, and give last_batch='keep'"
        )
    if not isinstance(loader.dataset, IterableDataset) and _samples_of(loader) in range(
        loader.batch_size or 0
    ):
        return (
            f"last_batch='drop' with fewer samples than one batch of {loader.batch_size}: expected at least one batch."
            " Make the batch smaller"
        )
    return None


def loader_that_drops(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader like ``loader`` that leaves out a last batch that is not full."""
    if loader.drop_last:
        return loader
    made = copy.copy(loader)
    sampler: Any = loader.batch_sampler
    # The class forbids to change these after its constructor, which a subclass may have changed.
    vars(made)["batch_sampler"] = BatchSampler(sampler.sampler, sampler.batch_size, drop_last=True)
    vars(made)["drop_last"] = True
    vars(made)["_iterator"] = None  # the workers that the original keeps are not those of the copy
    return made


def evaluation_loader(loader: Any, size: int) -> Any:
    """Return a loader of the same samples in batches of ``size``, or ``None`` where that cannot be had."""
    # One that leaves out its last batch would leave out other samples, or all of them.
    if not isinstance(loader, DataLoader) or not _is_plain(loader):
        return None
    if isinstance(loader.dataset, IterableDataset) or _samples_of(loader) is None or loader.drop_last:
        return None
    return with_batch_size(loader, size)


def _samples_of(loader: DataLoader[Any]) -> int | None:
    return len(loader.sampler) if isinstance(loader.sampler, Sized) else None


def _is_plain(loader: DataLoader[Any]) -> bool:
    return loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler


# -- The loaders of a run: what they say of their batches, and how they are changed, the same on all ranks --


def stage_of(trainer: Trainer) -> str:
    """Return what a Trainer is at: ``training``, ``validation``, ``test`` or ``predict``."""
    if trainer.predicting or trainer.testing:
        return "predict" if trainer.predicting else "test"
    return "training" if trainer.training else "validation"


def batch_size_in_use(trainer: Trainer, stage: str, dataloader_idx: int) -> int | None:
    """Return how many samples the batches of a loader of the run have, or ``None`` where it does not say."""
    return size_of(_loop_of(trainer, stage)._combined_loader.flattened[dataloader_idx])


def refuse_joined_batches(trainer: Trainer, stage: str, option: str) -> None:
    """Refuse to pad batches made of batches of several loaders, each with its own number of samples."""
    combined = _loop_of(trainer, stage)._combined_loader
    if len(combined.flattened) > 1 and combined._mode != "sequential":
        raise ConfigurationError(
            f"StaticShapes({option}='pad') with several loaders of {stage} at once: expected one, as there is one mask"
            f" for a batch, and its parts have different numbers of samples. Give {option}="
            f"{'drop' if stage == 'training' else 'keep'!r}."
        )


def _loop_of(trainer: Trainer, stage: str) -> Any:
    if stage == "validation" and trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    name = {"training": "fit", "validation": "validate"}.get(stage, stage)
    return getattr(trainer, f"{name}_loop")


def _dropping(loader: Any) -> Any:
    fault = fault_of_dropping(loader)
    faults = current_communicator().agree(fault is not None, fault or "")
    if faults:
        rank, reason = next(iter(faults.reasons.items()))
        raise ConfigurationError(f"StaticShapes on rank {rank}: {reason}.")
    return loader_that_drops(loader)


def _limits_batches(trainer: Trainer, stage: str) -> bool:
    """Return whether an evaluation is to take a number or a part of its batches, of which the size then matters."""
    limit = trainer.limit_test_batches if stage == "test" else trainer.limit_val_batches
    return isinstance(limit, int) or limit < 1.0


def _described(batch: Any) -> str:
    if hasattr(batch, "keys"):
        return f"a {type(batch).__name__} with the keys {', '.join(map(repr, batch.keys()))}"
    if isinstance(batch, (list, tuple)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


# -- The shapes of a run: its loaders, and to what each batch is padded, by what its loader says or has given
# so far


class ShapedStages:
    """Gives the batches of training, validation and test the shapes that the settings ask for."""

    def __init__(self, settings: StaticShapesSettings) -> None:
        self._settings = settings
        self._fill = dict(settings.fill_values or {})
        self._sequences = dict(settings.sequence_values or {})
        self._largest: Counter[tuple[str, int]] = Counter()
        self._looked_at = False  # whether the first batch of training has been
        self._said: set[str] = set()  # what is said once
        self.training_size: int | None = None  # samples of a training batch, once asked; None: not known
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
        if stage != "training" or self._looked_at:
            return
        self._looked_at = True
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
        if longest > most and "long" not in self._said:
            self._said.add("long")
            _log.warning(
                "StaticShapes: a sequence of %d is longer than the largest of sequence_lengths, %d. It is not padded,"
                " and is compiled separately; add a length of at least %d.",
                longest,
                most,
                longest,
            )

    def loader_of_run(self, trainer: Trainer, loader: Any) -> Any:
        """Return a loader as the settings want it, which all ranks ask for together."""
        stage = stage_of(trainer)
        if stage == "training" and self._settings.last_batch == "drop":
            return _dropping(loader)
        if stage in ("validation", "test") and self._settings.evaluation_at_training_size:
            return self._at_training_size(trainer, stage, loader)
        return loader

    def _at_training_size(self, trainer: Trainer, stage: str, loader: Any) -> Any:
        """Give a loader the batch size of training, where every rank then evaluates what it would have evaluated."""
        size = None if _limits_batches(trainer, stage) else self._size_of_training(trainer)
        made = None if size is None else evaluation_loader(loader, size)
        counts = current_communicator().gather(None if made is None else len(made))
        if made is None or None in counts:
            return loader
        if len(set(counts)) > 1:
            if trainer.is_global_zero:
                _log.warning(
                    "StaticShapes: %s keeps its batch size of %s. With that of training, %s, the ranks would have"
                    " different numbers of batches: %s.",
                    stage,
                    size_of(loader),
                    size,
                    ", ".join(map(str, counts)),
                )
            return loader
        text = f"StaticShapes: {stage} takes {size} samples at once instead of {size_of(loader)}, as training does"
        if size != size_of(loader) and trainer.is_global_zero and text not in self._said:
            self._said.add(text)
            say(f"{text} (evaluation_at_training_size).")
        return made

    def _size_of_training(self, trainer: Trainer) -> int | None:
        """Return the batch size of training, also before its loader is made."""
        combined = trainer.fit_loop._combined_loader
        if combined is not None:
            return size_of(combined.flattened[0])
        if self.training_size is None and trainer.state.fn == TrainerFn.FITTING:
            source = trainer.fit_loop._data_source
            loaders = CombinedLoader(source.dataloader()).flattened if source.is_defined() else []
            self.training_size = size_of(loaders[0]) if loaders else None
        return self.training_size
