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
    """What a batch has (indices, then samples), and its place."""

    def __init__(self, content: Iterable[Any], place: tuple[int, ...]) -> None:
        super().__init__(content)
        self.place = BatchPlace(*place)

    def __reduce__(self) -> Any:  # to a worker it travels as plain data, which takes 3 us
        return PlacedBatch, (list(self), tuple(self.place))


def seeded_by_sample(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a loader that loads with numbers of the sample; its batch sampler, or sampler, gives a `PlacedBatch`."""
    collate = SeededCollate(loader.collate_fn, seed)
    return loader_with(loader, dataset=SeededSamples(loader.dataset, seed), collate_fn=collate)


class SeededSamples(Dataset[Any]):
    """Loads the samples of a data set with numbers of their positions; attributes are those of that data set."""

    def __init__(self, dataset: Any, seed: int) -> None:
        # Those with a generator of their own, which may be within a `Subset` or a `ConcatDataset`.
        parts, owners = [dataset], []
        for part in parts:  # the list grows during the loop
            inner = vars(part) if hasattr(part, "__dict__") else {}
            parts += [*inner.get("datasets", ()), *([inner["dataset"]] if "dataset" in inner else ())]
            owners += [part] if callable(getattr(part, "seed_sample", None)) else []
        vars(self).update(_dataset=dataset, _seed=seed, _owners=owners)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_seed", "_owners") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getitem__(self, index: Any) -> Any:
        # A loader without batches gives its one index in a batch, too.
        return self.__getitems__(index)[0] if isinstance(index, PlacedBatch) else self._dataset[index]

    def __getitems__(self, batch: PlacedBatch) -> PlacedBatch:
        """Return the samples of a batch, each loaded by itself."""
        place, dataset = batch.place, self._dataset
        several: Callable[..., Any] | None = getattr(dataset, "__getitems__", None)
        epoch, found = mixed(self._seed, place.epoch), PlacedBatch((), place)
        with kept_generators():
            for number, index in enumerate(batch):
                key = mixed(epoch + place.first + number * place.stride)
                seed_generators(key)
                for owner in self._owners:
                    owner.seed_sample(key & 0xFFFFFFFF)
                found.append(several([index])[0] if several else dataset[index])
        return found


class SeededCollate:
    """Collates with numbers of the global batch, which are the same on all ranks."""

    def __init__(self, collate: Callable[[Any], Any], seed: int) -> None:
        self._collate, self._seed = collate, seed

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, PlacedBatch):  # of a loader without batches
            return self._collate(samples)
        with kept_generators():
            seed_generators(mixed(self._seed, samples.place.epoch, samples.place.number))
            return self._collate(list(samples))
