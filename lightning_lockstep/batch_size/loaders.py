"""Where the batch size lives, and real batches of any size from there.

It lives in an attribute (of the module, its hparams, the data module or its hparams) that the loader is made
with, or in a DataLoader that was passed to ``fit()``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_lockstep._lightning import (
    CombinedLoader,
    LightningModule,
    Trainer,
    _lightning_get_all_attr_holders,
)
from lightning_lockstep._lightning.internals import data_source, drop_loaders
from lightning_lockstep.errors import BatchSizeError

__all__ = ["BatchLoaders", "with_batch_size"]


class BatchLoaders:
    """The batch size of one loop, where it is kept, and the data behind it.

    Args:
        trainer: The Trainer, in a loop.
        module: Its module.
        name: Name of the attribute.

    Attributes:
        size: The size as it is configured now (samples per rank).
        samples: Samples that one rank gets in an epoch; the smallest number over all ranks is not known here.
        described: Where the size lives, for people.

    Raises:
        BatchSizeError: There is no such attribute, or no loader whose size can be changed.

    Ranks: every rank; the loader's hook is called once, nothing else is sent.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, name: str = "batch_size") -> None:
        self._trainer, self._module, self._name = trainer, module, name
        self._loop = getattr(trainer, f"{trainer.state.fn.value if trainer.state.fn else 'fit'}_loop")
        self._source = data_source(self._loop)
        self._in_attribute = bool(self._source.is_module())
        holders = _lightning_get_all_attr_holders(module, name)
        if self._in_attribute and not holders:
            raise BatchSizeError(
                f"no attribute {name!r} was found in the module, its hparams, the data module or its hparams."
                f" Add self.{name} and make the loader with it, name another with batch_arg_name=, or pass the"
                " DataLoader to the Trainer's method."
            )
        given = self._request()
        self._combined = given if isinstance(given, CombinedLoader) else None
        self.loaders = (
            [_checked(loader) for loader in CombinedLoader(given).flattened] if given is not None else []
        )
        if not self.loaders:
            raise BatchSizeError(
                "there is no DataLoader to change the batch size of: the loader is empty or None"
            )
        self.size = int(self.loaders[0].batch_size or 1)
        self.described = f"DataLoader passed to {trainer.state.fn.value if trainer.state.fn else 'fit'}()"
        if self._in_attribute:
            self._check_attribute(holders)
        world_size = trainer.world_size
        self.samples = min(_samples_per_rank(loader, world_size) for loader in self.loaders)

    def _check_attribute(self, holders: list[Any]) -> None:
        self.described = " and ".join(f"{type(holder).__name__}.{self._name}" for holder in holders)
        value = _value(holders[0], self._name)
        if value is not None and value != self.size:
            raise BatchSizeError(
                f"{self.described} is {value!r}, but the loader was made with batch_size={self.size}."
                f" Make it with self.{self._name}, so that a change has an effect."
            )

    def _request(self) -> Any:
        if not self._source.is_defined():
            return None
        return self._source.dataloader()

    def apply(self, size: int) -> None:
        """Make ``size`` the batch size of the run.

        Args:
            size: Samples per rank.

        Ranks: every rank, with the same size; loaders that exist already are made anew, which in an
            evaluation is as collective as their first making.
        """
        if self._in_attribute:
            for holder in _lightning_get_all_attr_holders(self._module, self._name):
                if isinstance(holder, dict):
                    holder[self._name] = size
                else:
                    setattr(holder, self._name, size)
        else:
            self._source.instance = self._rebuilt(size)
        self.size = size
        if drop_loaders(self._loop):
            self._loop.setup_data()
            if self._trainer.state.fn is not None and self._trainer.state.fn.value != "fit":
                self._loop.reset()

    def _rebuilt(self, size: int) -> Any:
        if self._combined is not None:
            combined = copy.copy(self._combined)
            combined.flattened = [with_batch_size(loader, size) for loader in self.loaders]
            return combined
        given = self._source.instance
        if isinstance(given, DataLoader):
            return with_batch_size(given, size)
        return _map_loaders(given, lambda loader: with_batch_size(loader, size))

    def batch(self, size: int) -> Any:
        """Return one collated batch of ``size`` samples, in the structure that the step expects.

        The samples are those the sampler gives first; where there are fewer, they are repeated.

        Args:
            size: Samples.

        Ranks: any rank, alone; random generators move on.
        """
        made = [_collated(loader, size) for loader in self.loaders]
        given = self._combined.iterables if self._combined is not None else None
        if given is None:
            given = self._source.instance if not self._in_attribute else self.loaders[0]
        if isinstance(given, DataLoader) or len(made) == 1:
            return made[0]
        batches = iter(made)
        return _map_loaders(given, lambda loader: next(batches))

    def generators(self) -> list[torch.Generator]:
        """Return the random generators of loaders and samplers."""
        holders = itertools.chain.from_iterable((loader, loader.sampler) for loader in self.loaders)
        found = [getattr(holder, "generator", None) for holder in holders]
        return [generator for generator in found if isinstance(generator, torch.Generator)]


def with_batch_size(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a loader like ``loader``, of the same class and with the same sampler, of another batch size.

    Args:
        loader: A loader that nobody iterates over.
        size: Samples per batch.
    """
    made = copy.copy(loader)
    # The class forbids to change these after its constructor, which a subclass may have changed.
    vars(made)["batch_sampler"] = BatchSampler(loader.sampler, size, loader.drop_last)
    vars(made)["batch_size"] = size
    vars(made)["_iterator"] = None
    return made


def _value(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name)


def _checked(loader: object) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise BatchSizeError(
            f"the batch size of a {type(loader).__name__} cannot be changed from outside; a DataLoader can"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise BatchSizeError(
            "the data set is an IterableDataset, which has no length and no sampler: how many samples there are"
            " for a trial, and where the run would go on, cannot be known. Set the batch size yourself."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler or loader.sampler).__name__
        raise BatchSizeError(
            f"the loader has a batch sampler of its own ({kind}), and only that knows how to change its size."
            " Pass batch_size= and sampler= to the DataLoader instead, or set the size yourself."
        )
    return loader


def _samples_per_rank(loader: DataLoader[Any], world_size: int) -> int:
    samples = len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(loader.sampler, DistributedSampler):
        return samples // loader.sampler.num_replicas
    given = len(loader.sampler) if isinstance(loader.sampler, Sized) else samples
    return max(1, min(samples, given) // world_size)


def _collated(loader: DataLoader[Any], size: int) -> Any:
    indices: Iterable[Any] = itertools.islice(_repeat(loader.sampler), size)
    dataset: Any = loader.dataset
    if hasattr(dataset, "__getitems__"):
        samples = dataset.__getitems__(list(indices))
    else:
        samples = [dataset[index] for index in indices]
    return loader.collate_fn(samples)


def _repeat(sampler: Iterable[Any]) -> Iterable[Any]:
    while True:
        empty = True
        for index in sampler:
            empty = False
            yield index
        if empty:
            raise BatchSizeError("the sampler of the loader is empty on this rank")


def _map_loaders(tree: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return type(tree)((key, _map_loaders(value, function)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_loaders(value, function) for value in tree)
    return function(tree)
