"""Augmentation by sample: each sample is loaded with random numbers of seed, epoch and position in the epoch's order.

So they are the same on any number of ranks and workers, and a sample that is drawn twice differs. The batch sampler
gives batches of indices that carry their place, :class:`PlacedBatch`. A batch is collated with numbers of the global
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lightning_lockstep.steps.generators import kept_generators, mixed, seed_generators
from lightning_lockstep.steps.patching import loader_with
from lightning_lockstep.steps.sample_numbers import BatchPlace


class PlacedBatch(list[Any]):
    """The indices of a batch, and its place."""

    def __init__(self, indices: Iterable[Any], place: BatchPlace) -> None:
        super().__init__(indices)
        self.place = place


def seeded_by_sample(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a loader that loads with numbers of the sample; its batch sampler, or sampler, gives a `PlacedBatch`."""
    batches = SeededBatches(loader.dataset, loader.collate_fn, seed)
    return loader_with(loader, dataset=batches, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


class SeededBatches(Dataset[Any]):
    """Loads a data set's samples with numbers of their positions, and collates them; attributes are the data set's."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int) -> None:
        # Those with a generator of their own, which may be within a `Subset` or a `ConcatDataset`.
        parts, owners = [dataset], []
        for part in parts:  # the list grows during the loop
            inner = vars(part) if hasattr(part, "__dict__") else {}
            parts += [*inner.get("datasets", ()), *([inner["dataset"]] if "dataset" in inner else ())]
            owners += [part] if callable(getattr(part, "seed_sample", None)) else []
        vars(self).update(_dataset=dataset, _collate=collate, _seed=seed, _owners=owners)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, PlacedBatch):
            return self._dataset[index]
        return self.__getitems__(index, batched=False)  # of a loader without batches, with one index

    def __getitems__(self, indices: PlacedBatch, *, batched: bool = True) -> Any:
        """Return a collated batch."""
        place, dataset, found = indices.place, self._dataset, []
        several: Callable[..., Any] | None = getattr(dataset, "__getitems__", None)
        epoch = mixed(self._seed, place.epoch)
        with kept_generators():
            for number, index in enumerate(indices):
                key = mixed(epoch + place.first + number * place.stride)
                seed_generators(key)
                for owner in self._owners:
                    owner.seed_sample(key & 0xFFFFFFFF)
                found.append(several([index])[0] if several else dataset[index])
            seed_generators(mixed(self._seed, place.epoch, place.number))
            return self._collate(found if batched else found[0])
