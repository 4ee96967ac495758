"""Where the batch size of a run is kept, and real batches of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_lockstep._lightning import (
    CombinedLoader,
    LightningModule,
    MisconfigurationException,
    Trainer,
    _lightning_get_all_attr_holders,
    _set_sampler_epoch,
)
from lightning_lockstep._trainer import divides_data
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.patching import loader_with
from lightning_lockstep.steps.snapshot import generators_of


class SearchRefusedError(BatchSizeError, MisconfigurationException):
    """A search is not possible on any rank; programs for ``BatchSizeFinder`` catch it as Lightning's."""


# The batch size is kept in an attribute (of the module, its hparams, the data module or its hparams) with which the
# loader is made, or in a DataLoader that was passed to ``fit()``. In both cases every attribute of that name is changed
# too, because a step may read it.


class BatchLoaders:
    """The batch size of one loop, where it is kept, and the data behind it."""

    def __init__(self, trainer: Trainer, module: LightningModule, name: str = "batch_size") -> None:
        self._trainer, self._module, self._name = trainer, module, name
        self._loop = getattr(trainer, f"{loop_of(trainer)}_loop")
        self._source = self._loop._data_source
        self.in_attribute = bool(self._source.is_module())  # whether the loaders are made with the attribute
        if self.in_attribute and not self._holders():
            raise SearchRefusedError(
                f"no attribute {name!r} was found in the module, its hparams, the data module or its hparams."
                f" Add self.{name} and make the loader with it, name another with batch_arg_name=, or pass the"
                " DataLoader to the Trainer's method."
            )
        self._given = self._source.dataloader() if self._source.is_defined() else None
        self.loaders = _flattened(self._given)
        if not self.loaders:
            raise SearchRefusedError("there is no DataLoader to change the batch size of: the loader is empty or None")
        self.size = int(self.loaders[0].batch_size or 1)  # as configured now [samples per rank]
        if self.in_attribute and self.size not in self._values():
            self._check_effect()
        # The samples of this rank in an epoch; another rank may have one more.
        self.samples = max(1, min(_share(trainer, loader)[0] for loader in self.loaders))
        self.samples_of_all = max(1, min(_share(trainer, loader)[1] for loader in self.loaders))

    @property
    def can_differ(self) -> bool:
        """Whether ranks may have micro-batches of different sizes, because the strategy divides and weights them."""
        divides = hasattr(self._trainer.strategy, "micro_batches") and divides_data(self._trainer)
        own = any(isinstance(loader.sampler, DistributedSampler) for loader in self.loaders)
        return divides and not own and not getattr(self._trainer, "overfit_batches", 0)

    def _check_effect(self) -> None:
        """Raise unless the batch size of the loader changes with the attribute, though it may be another number."""
        value = next(filter(None, self._values()), None)
        if value is None:
            return
        with self.former_size():
            follows = _flattened(self._with_size(self.size + 1))[0].batch_size != self.size
        if not follows:
            places = " and ".join(f"{type(holder).__name__}.{self._name}" for holder in self._holders())
            raise SearchRefusedError(
                f"{places} is {value!r}, but the loader was made with batch_size={self.size}."
                f" Make it with self.{self._name}, so that a change has an effect."
            )

    # -- the attributes --

    def _holders(self) -> list[Any]:
        """Return what has an attribute (or key) of that name; perhaps nothing, if a DataLoader was passed."""
        # These are looked up each time, because restoring a module may replace its hparams. A property that cannot be
        # set is left out, because it shows what another attribute holds.
        found = _lightning_get_all_attr_holders(self._module, self._name)
        attributes = [getattr(type(holder), self._name, None) for holder in found]
        return [
            holder
            for holder, attribute in zip(found, attributes, strict=True)
            if not isinstance(attribute, property) or attribute.fset is not None
        ]

    def _values(self) -> list[Any]:
        return [
            holder[self._name] if isinstance(holder, dict) else getattr(holder, self._name)
            for holder in self._holders()
        ]

    def _write(self, values: Sequence[Any]) -> None:
        for holder, value in zip(self._holders(), values, strict=True):
            if isinstance(holder, dict):
                holder[self._name] = value
            else:
                setattr(holder, self._name, value)

    def hold(self, size: int) -> None:
        """Let every attribute of that name hold ``size``."""
        self._write([size] * len(self._holders()))

    @contextmanager
    def former_size(self, *, on_error_only: bool = False) -> Iterator[None]:
        """Restore the values of the attributes when the body ends, or only if it raises."""
        before = self._values()
        try:
            yield
        except BaseException:
            self._write(before)
            raise
        if not on_error_only:
            self._write(before)

    # -- the loaders --

    def _with_size(self, size: int) -> Any:
        """Return the loaders that the loop would get with that size, and let the attributes hold it."""
        self.hold(size)
        if self.in_attribute:
            return self._source.dataloader()
        return apply_to_collection(self._source.instance, DataLoader, with_batch_size, size)

    def apply(self, size: int) -> None:
        self.size = size
        if self.in_attribute:
            self.hold(size)
        else:
            self._source.instance = self._with_size(size)
        trials = getattr(self._trainer.strategy, "engine_trials", None)
        fits = in_fit(self._trainer)
        if trials is not None and fits:
            trials.take_sizes(batch_size=size, accumulate=self._trainer.accumulate_grad_batches)
        # Making loaders is collective in an evaluation, so all ranks do it together. A loop makes its loaders only if
        # it has none.
        if self._loop._combined_loader is not None:
            self._loop._combined_loader = None
            self._loop.setup_data()
            if not fits:
                self._loop.reset()
                return
            # During a fit: shuffle for this epoch, and validate with the new size from the next time on.
            for loader in self._loop._combined_loader.flattened:
                _set_sampler_epoch(loader, self._trainer.current_epoch)
            if self.in_attribute:
                self._loop.epoch_loop.val_loop._combined_loader = None

    def batch(self, size: int) -> Any:
        """Return one collated batch of ``size`` samples, in the structure that the step expects."""
        made = [_first_batch(loader, size) for loader in self.loaders]
        if not in_fit(self._trainer):  # evaluations take one loader after the other
            return made[0]
        batches = iter(made)
        return apply_to_collection(self._given, DataLoader, lambda loader: next(batches))

    def generators(self) -> list[torch.Generator]:
        return generators_of(*self.loaders)


def loop_of(trainer: Trainer) -> str:
    return trainer.state.fn.value if trainer.state.fn is not None else "fit"


def in_fit(trainer: Trainer) -> bool:
    return loop_of(trainer) == "fit"


def with_batch_size(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a loader like ``loader``, of the same class and with the same sampler, of another batch size."""
    batches = BatchSampler(loader.sampler, size, loader.drop_last)
    return loader_with(loader, batch_sampler=batches, batch_size=size)


def _share(trainer: Trainer, loader: DataLoader[Any]) -> tuple[int, int]:
    """Return how many different samples every rank gets at least, and all ranks together."""
    dataset: Any = loader.dataset
    sampler, ranks = loader.sampler, trainer.world_size
    if isinstance(sampler, DistributedSampler):
        return len(dataset) // sampler.num_replicas, len(dataset)
    given = min(len(dataset), len(sampler if isinstance(sampler, Sized) else dataset))
    return (given // ranks, given) if divides_data(trainer) else (given, given * ranks)


def _flattened(given: Any) -> list[DataLoader[Any]]:
    return [] if given is None else [_checked(loader) for loader in CombinedLoader(given).flattened]


def _checked(loader: object) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise SearchRefusedError(
            f"the batch size of a {type(loader).__name__} cannot be changed from outside: pass a DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise SearchRefusedError(
            "the data set is an IterableDataset, which has no length and no sampler: how many samples there are"
            " for a trial, and where the run would go on, cannot be known. Set the batch size yourself."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.sampler if loader.batch_sampler is None else loader.batch_sampler).__name__
        raise SearchRefusedError(
            f"the loader has its own batch sampler ({kind}), and only that knows how to change its size."
            " Pass batch_size= and sampler= to the DataLoader instead, or set the size yourself."
        )
    return loader


def _first_batch(loader: DataLoader[Any], size: int) -> Any:
    """Return the samples that the sampler gives first as one batch, which this process loads."""
    batches = BatchSampler(loader.sampler, size, drop_last=False)
    for batch in loader_with(loader, batch_sampler=batches, batch_size=size, num_workers=0, timeout=0):
        return batch
    raise BatchSizeError("the sampler of the loader is empty on this rank: expected at least one sample")
