"""Where the batch size of a run lives, and real batches of any size."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_lockstep._doors.lightning import (
    CombinedLoader,
    LightningModule,
    MisconfigurationException,
    Trainer,
    _lightning_get_all_attr_holders,
)
from lightning_lockstep._doors.lightning_internals import (
    data_source,
    divides_data,
    drop_loaders,
    loaders_in_use,
)
from lightning_lockstep._doors.torch_internals import forget_iterator
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.capabilities import HasEngineTrials

# -- The error of a search that cannot begin --


class SearchRefusedError(BatchSizeError, MisconfigurationException):
    """A search is not possible on any rank; programs for ``BatchSizeFinder`` catch it as Lightning's."""


# -- The attributes that hold a batch size, in the places where Lightning looks for them --


class SizeAttributes:
    """The batch size as attribute of the module, its hparams, the data module and its hparams, wherever it exists.

    A property that cannot be set counts as none: it shows what another place holds.
    """

    def __init__(self, module: LightningModule, name: str) -> None:
        self._module, self._name = module, name

    def __bool__(self) -> bool:
        return bool(self._holders())

    def __str__(self) -> str:
        return " and ".join(f"{type(holder).__name__}.{self._name}" for holder in self._holders())

    @property
    def values(self) -> list[Any]:
        """What each place holds, in Lightning's order."""
        return [
            holder[self._name] if isinstance(holder, dict) else getattr(holder, self._name)
            for holder in self._holders()
        ]

    def set(self, size: int) -> None:
        self._write([size] * len(self._holders()))

    @contextmanager
    def former_on_error(self) -> Iterator[None]:
        """Put the former values back if the body raises."""
        before = self.values
        try:
            yield
        except BaseException:
            self._write(before)
            raise

    @contextmanager
    def former_afterwards(self) -> Iterator[None]:
        """Put the former values back when the body ends."""
        before = self.values
        try:
            yield
        finally:
            self._write(before)

    def _holders(self) -> list[Any]:
        # Looked up each time: restoring a module may replace its hparams.
        found = _lightning_get_all_attr_holders(self._module, self._name)
        return [holder for holder in found if not _is_read_only(holder, self._name)]

    def _write(self, values: Sequence[Any]) -> None:
        for holder, value in zip(self._holders(), values, strict=True):
            if isinstance(holder, dict):
                holder[self._name] = value
            else:
                setattr(holder, self._name, value)


def _is_read_only(holder: Any, name: str) -> bool:
    attribute = getattr(type(holder), name, None)
    return isinstance(attribute, property) and attribute.fset is None


# -- Where the batch size lives, and real batches of any size from there --
# It lives in an attribute (of the module, its hparams, the data module or its hparams) that the loader is
# made with, or in a DataLoader that was passed to ``fit()``.


class BatchLoaders:
    """The batch size of one loop, where it is kept, and the data behind it."""

    def __init__(self, trainer: Trainer, module: LightningModule, name: str = "batch_size") -> None:
        self._trainer = trainer
        self._loop = getattr(trainer, f"{trainer.state.fn.value if trainer.state.fn else 'fit'}_loop")
        self._source = data_source(self._loop)
        self.in_attribute = bool(self._source.is_module())  # whether the loaders are made with the attribute
        self.attributes = SizeAttributes(module, name)  # perhaps none, where a DataLoader was passed
        if self.in_attribute and not self.attributes:
            raise SearchRefusedError(
                f"no attribute {name!r} was found in the module, its hparams, the data module or its hparams."
                f" Add self.{name} and make the loader with it, name another with batch_arg_name=, or pass the"
                " DataLoader to the Trainer's method."
            )
        given = self._request()
        self._combined = given if isinstance(given, CombinedLoader) else None
        self.loaders = _flattened(given)
        if not self.loaders:
            raise SearchRefusedError(
                "there is no DataLoader to change the batch size of: the loader is empty or None"
            )
        self.size = int(self.loaders[0].batch_size or 1)  # as configured now [samples per rank]
        if self.in_attribute and self.size not in self.attributes.values:
            self._check_effect(name)
        # Of this rank in an epoch; the smallest number of all ranks is not known here.
        self.samples = max(1, min(_whole_share(trainer, loader) for loader in self.loaders))

    def _check_effect(self, name: str) -> None:
        """Raise unless the loader follows the attribute, if not to the very number."""
        value = next(filter(None, self.attributes.values), None)
        if value is None:
            return
        with self.attributes.former_afterwards():
            follows = self.made_with(self.size + 1)[0].batch_size != self.size
        if not follows:
            raise SearchRefusedError(
                f"{self.attributes} is {value!r}, but the loader was made with batch_size={self.size}."
                f" Make it with self.{name}, so that a change has an effect."
            )

    def _request(self) -> Any:
        if not self._source.is_defined():
            return None
        return self._source.dataloader()

    def made_with(self, size: int) -> list[DataLoader[Any]]:
        """Return the loaders that the run would have with that size, which the attributes then hold."""
        self.attributes.set(size)
        if self.in_attribute:
            return _flattened(self._request())
        return [with_batch_size(loader, size) for loader in self.loaders]

    def apply(self, size: int) -> None:
        """Make ``size`` the batch size of the run."""
        self.attributes.set(size)
        if not self.in_attribute:
            self._source.instance = self._rebuilt(size)
        self.size = size
        strategy = self._trainer.strategy
        if isinstance(strategy, HasEngineTrials) and self._fits:
            strategy.engine_trials.take_sizes(
                batch_size=size, accumulate=self._trainer.accumulate_grad_batches
            )
        # All ranks, alike: in an evaluation this is as collective as the first making of the loaders.
        if drop_loaders(self._loop):
            self._loop.setup_data()
            if self._fits:
                self._go_on_in_fit()
            else:
                self._loop.reset()

    @property
    def _fits(self) -> bool:
        return self._trainer.state.fn is None or self._trainer.state.fn.value == "fit"

    def _go_on_in_fit(self) -> None:
        """In the midst of a fit: shuffle for this epoch, and validate with the new size from the next time on."""
        for loader in loaders_in_use(self._loop):
            set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._trainer.current_epoch)
        if self.in_attribute:
            drop_loaders(self._loop.epoch_loop.val_loop)

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
        """Return one collated batch of ``size`` samples, in the structure that the step expects."""
        # The samples are those the sampler gives first; where there are fewer, they are repeated.
        made = [_collated(loader, size) for loader in self.loaders]
        given = self._combined.iterables if self._combined is not None else None
        if given is None:
            given = self._source.instance if not self.in_attribute else self.loaders[0]
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
    """Return a loader like ``loader``, of the same class and with the same sampler, of another batch size."""
    made = copy.copy(loader)
    # The class forbids to change these after its constructor, which a subclass may have changed.
    vars(made)["batch_sampler"] = BatchSampler(loader.sampler, size, loader.drop_last)
    vars(made)["batch_size"] = size
    forget_iterator(made)
    return made


def samples_of_rank(trainer: Trainer, loader: DataLoader[Any]) -> int:
    """Return the samples that this rank gets of a loader in an epoch, those that fill up a share included."""
    ranks = _divided_by(trainer, loader)
    return -(-_given(loader) // ranks)


def _whole_share(trainer: Trainer, loader: DataLoader[Any]) -> int:
    """Samples that every rank gets at least, none of them twice."""
    if isinstance(loader.sampler, DistributedSampler):
        return len(loader.dataset) // loader.sampler.num_replicas  # type: ignore[arg-type]
    return min(len(loader.dataset), _given(loader)) // _divided_by(trainer, loader)  # type: ignore[arg-type]


def _given(loader: DataLoader[Any]) -> int:
    return len(loader.sampler if isinstance(loader.sampler, Sized) else loader.dataset)  # type: ignore[arg-type]


def _divided_by(trainer: Trainer, loader: DataLoader[Any]) -> int:
    already = isinstance(loader.sampler, DistributedSampler) or not divides_data(trainer)
    return 1 if already else trainer.world_size


def _flattened(given: Any) -> list[DataLoader[Any]]:
    return [] if given is None else [_checked(loader) for loader in CombinedLoader(given).flattened]


def _checked(loader: object) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise SearchRefusedError(
            f"the batch size of a {type(loader).__name__} cannot be changed from outside; a DataLoader can"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise SearchRefusedError(
            "the data set is an IterableDataset, which has no length and no sampler: how many samples there are"
            " for a trial, and where the run would go on, cannot be known. Set the batch size yourself."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler or loader.sampler).__name__
        raise SearchRefusedError(
            f"the loader has a batch sampler of its own ({kind}), and only that knows how to change its size."
            " Pass batch_size= and sampler= to the DataLoader instead, or set the size yourself."
        )
    return loader


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
