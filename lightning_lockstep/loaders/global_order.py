"""One order of samples for all ranks: each epoch is cut into global batches, and each of those divided among the ranks.

The loader of the program is divided as it is: its own sampler, or its own batch sampler, is drawn whole, by seed and
epoch, and what was drawn is cut. What it gives is of one of three kinds:

- samples (``batch_size=4``): rank ``r`` gets ``batch[r::ranks]`` of each global batch, so that a step sees the same
  samples on any number of ranks, and the parts differ by one sample at most;
- batches (a batch sampler of the program's own) and items (``batch_size=None``): the ranks take them in turn, whole.

Every rank has the same number of batches. A rank without a sample in a global batch gets a padding sample, which must
not count. Whatever is of another kind is left alone.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from lightning_lockstep._lightning import _IndexBatchSamplerWrapper, sized_len
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.loaders.resume_point import ResumePoint, since_begin
from lightning_lockstep.steps.patching import loader_with
from lightning_lockstep.steps.sample_numbers import BatchPlace
from lightning_lockstep.steps.snapshot import generators_of, kept_generators, mixed, seed_generators

# -- What kind a loader is --

Kind = Literal["samples", "batches", "items"]


def kind_of(loader: Any) -> Kind | None:
    """Return what the sampler of a loader gives; ``None`` if the loader is left alone."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches = asked_sampler(loader.batch_sampler)
    samplers = loader.sampler, batches, getattr(batches, "sampler", None)
    # A sampler that knows the number of ranks gives each its own samples, as a DistributedSampler does.
    if any(isinstance(one, GlobalBatches) or hasattr(one, "num_replicas") for one in samplers):
        return None
    return "items" if batches is None else "samples" if type(batches) is BatchSampler else "batches"


def asked_sampler(batches: Any) -> Any:
    """Return the batch sampler that Lightning's for predictions asks; any other one itself."""
    return batches._batch_sampler if type(batches) is _IndexBatchSamplerWrapper else batches


def parts_of(loader: Any) -> Any:
    """Return the sampler whose ``sizes`` tells the sizes of a loader's batches; ``None`` if there is none."""
    batches = getattr(loader, "batch_sampler", None)
    for one in (batches, asked_sampler(batches), getattr(loader, "sampler", None)):
        if callable(getattr(one, "sizes", None)):
            return one
    return None


def micro_batches(size: int, count: int) -> tuple[int, ...]:
    """Divide a global batch into this many micro-batches, whose sizes differ by one sample at most."""
    return tuple(size // count + (number < size % count) for number in range(count))


# -- What a sampler gives in an epoch --

Order = list[Any] | NDArray[Any]  # an array if it holds numbers alone: 8 bytes for each
_TOO_MANY = 100  # a sampler without a length that gives this many times the dataset, and a million, counts as endless


def seed_of_run() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def drawn(sampler: Any, most: int) -> Order:
    """Return all that a sampler gives in an epoch."""
    # `most`: a sampler that gives more than this is taken for endless.
    if type(sampler) is SequentialSampler:
        return numpy.arange(len(sampler))
    if type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement:
        return _permutations(len(sampler.data_source), len(sampler))
    items, chunks = iter(sampler), list[Any]()
    declared = sized_len(sampler)  # Lightning, too, takes no more than that
    while chunk := list(islice(items, 65_536)):
        chunks.append(numpy.array(chunk) if set(map(type, chunk)) == {int} else chunk)
        if sum(map(len, chunks)) > (most if declared is None else declared):
            if declared is not None:
                break
            raise ConfigurationError(
                f"{type(sampler).__name__} has no length and gave more than {most:,} batches or samples for one epoch:"
                " expected one that ends. Give it a length, or divide the data yourself and set"
                " Trainer(use_distributed_sampler=False)."
            )
    if chunks and all(isinstance(chunk, numpy.ndarray) for chunk in chunks):
        return numpy.concatenate(chunks)[:declared]
    return [item for chunk in chunks for item in _listed(chunk)][:declared]


def _permutations(samples: int, count: int) -> Order:
    """Return what a ``RandomSampler`` without a generator gives, without a list of Python's numbers."""
    generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    rounds = range(-(-count // samples)) if samples else ()
    found = [torch.randperm(samples, generator=generator).numpy() for _ in rounds]
    return found[0][:count] if len(found) == 1 else numpy.concatenate([*found, numpy.arange(0)])[:count]


def _listed(part: Order) -> list[Any]:
    return part.tolist() if isinstance(part, numpy.ndarray) else list(part)


def checksum(values: Order) -> int:
    if isinstance(values, numpy.ndarray):
        return zlib.crc32(numpy.ascontiguousarray(values).data)
    return zlib.crc32(repr(values).encode())


# -- A sample with random numbers of its own: those of seed, epoch and its position in the epoch's order --
# So they are the same on any number of ranks and workers, and a sample that is drawn twice differs.


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


# -- A rank's part of an epoch's order --


class _Start(NamedTuple):
    epoch: int
    drawn_from: Sequence[Any] = ()  # states of the sampler's generators from which its order is drawn
    unit: int = 0  # how many units were seen
    batches: int = 0  # how many batches were seen


class GlobalBatches(Sampler[Any]):
    """Gives a rank its part of each global batch of an epoch, in units: samples, or whole batches or items."""

    def __init__(self, loader: DataLoader[Any], kind: Kind, share: Share) -> None:
        batches, ranks = asked_sampler(loader.batch_sampler), share.ranks
        self.kind, self.epoch = kind, share.epoch
        self._multiple = 1  # a multiple of this many samples is used; those left at the end are dropped
        if kind == "samples":
            self.source: Any = batches.sampler
            sizes = share.micro_batches or (batches.batch_size * ranks,)
            if batches.drop_last:
                # A training epoch is cut to whole optimizer steps; an evaluation, or a batch sampler that the program
                # has made, to the batches that one process would have.
                by_steps = share.trains and loader.batch_size is not None
                step = sum(share.micro_batches or sizes * share.accumulated)
                self._multiple = step if by_steps else batches.batch_size
        else:
            self.source = loader.sampler if batches is None else batches
            sizes = share.micro_batches or (ranks,)
        self.batch_size = -(-max(sizes) // ranks) if kind == "samples" else None
        self.drop_last = False
        self._own, self._dataset = loader.sampler, loader.dataset
        self._sizes = sizes  # of the micro-batches of an optimizer step [units of all ranks]
        self._rank, self._ranks, self._by_sample = share.rank, ranks, share.by_sample
        self._accumulated = max(len(sizes), share.accumulated)
        self._seed = seed_of_run()
        self._order: Order = []
        self._bounds: NDArray[Any] = numpy.zeros(1, numpy.int64)  # where each micro-batch begins, and the end
        self.drawn_for = -1  # the epoch of the order
        self.drawn_from: list[Any] = []  # states of the sampler's generators when the order was drawn
        self._is_new = False  # whether it was drawn, and not given yet
        self._resumes_at = _Start(-1)  # of no epoch

    @property
    def sampler(self) -> GlobalBatches:
        """This object, whose ``set_epoch`` Lightning calls."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch next."""
        inner = self.source if self.kind == "samples" else getattr(self.source, "sampler", None)
        set_epoch = getattr(inner, "set_epoch", None)
        self._is_new = self._is_new and epoch == self.epoch and set_epoch is None
        self.epoch = epoch
        if inner is not self._own and set_epoch is not None:
            set_epoch(epoch)  # Lightning calls that of the loader's own sampler

    @property
    def _start(self) -> _Start:
        """Where this epoch begins: at its first unit, or where a resumed run goes on."""
        return self._resumes_at if self._resumes_at.epoch == self.epoch else _Start(self.epoch)

    def draw(self) -> None:
        """Draw the order of the epoch, unless that is done."""
        if self._is_new:
            return
        start, generators = self._start, generators_of(self.source)
        for generator, state in zip(generators, start.drawn_from, strict=False):
            generator.set_state(state)
        self.drawn_from = [generator.get_state() for generator in generators]
        most = _TOO_MANY * (sized_len(self._dataset) or 0) + 1_000_000
        with kept_generators():  # all ranks draw the same
            seed_generators(self._seed + self.epoch)
            self._order = drawn(self.source, most)
        self._order = self._order[: len(self._order) // self._multiple * self._multiple]
        self._is_new, self.drawn_for = True, self.epoch
        self._divide(start.unit, start.batches)

    def _divide(self, seen: int, batches: int) -> None:
        """Divide the order after ``seen`` units into the batches that come after the first ``batches``."""
        rest = bounds(len(self._order) - seen, self._sizes) + seen
        self._bounds = numpy.concatenate([numpy.zeros(batches, numpy.int64), rest])

    def __len__(self) -> int:
        """Return the number of batches of every rank in this epoch."""
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[Any]:
        self.draw()
        return self._parts(self._order, self._bounds.tolist(), self._start.batches)

    def _parts(self, order: Order, borders: list[int], first: int) -> Iterator[Any]:
        # These two are set here, not in `__iter__`, because a DataLoader makes one iterator that it never uses. A
        # shorter loader beside a longer one begins again within an epoch, and then from its start.
        self._is_new, self._resumes_at = False, _Start(-1)
        for number, (start, stop) in enumerate(pairwise(borders[first:]), first):
            own = order[start + self._rank : stop : self._ranks]
            part = _listed(own) or _listed(order[start : start + 1])
            part = part if self.kind == "samples" else part[0]
            if self._by_sample:
                part = PlacedBatch([part] if self.kind == "items" else part, self.place(number))
            yield part

    def place(self, number: int) -> BatchPlace:
        """Return which samples of the epoch batch ``number`` has on this rank."""
        first, samples = self.position(number) + self._rank, self.sizes(number)[0]
        if self.kind == "samples":
            return BatchPlace(self.epoch, number // self._accumulated, first, self._ranks, samples or 1)
        # A batch that stays whole is one place in the order, and its samples have positions of their own.
        return BatchPlace(self.epoch, first, first << 32, 1, samples)

    def sizes(self, number: int) -> tuple[int, int]:
        """Return how many samples of batch ``number`` of the epoch are this rank's, and all ranks'."""
        start, stop = self._bounds[number : number + 2].tolist()
        if self.kind == "samples":
            return len(range(start + self._rank, stop, self._ranks)), stop - start
        units = [len(unit) if isinstance(unit, Sized) else 1 for unit in self._order[start:stop]]
        return sum(units[self._rank :: self._ranks]), sum(units)

    @property
    def sizes_known(self) -> bool:
        """Whether ``sizes`` counts samples; an item may be a batch, which only its loading shows."""
        return self.kind != "items" or any(isinstance(unit, Sized) for unit in self._order[:1])

    @property
    def uneven(self) -> tuple[int, int] | None:
        """Sizes of the parts of the first global batch whose parts differ, or ``None``."""
        sizes = numpy.diff(self._bounds)
        uneven = sizes[sizes % self._ranks != 0]
        return (-(-int(uneven[0]) // self._ranks), int(uneven[0]) // self._ranks) if len(uneven) else None

    def smallest(self) -> int | None:
        """Return how many units the smallest global batch of the epoch has."""
        sizes = numpy.diff(self._bounds)
        # In a resumed epoch the batches before its position have no unit.
        return int(sizes[sizes > 0].min()) if sizes.any() else None

    # -- resuming --

    def position(self, number: int) -> int:
        """Return how many units come before a batch of the epoch."""
        return int(self._bounds[number])

    def order_checksum(self) -> int:
        return checksum(self._order)

    def record(self, numbers: range) -> dict[str, Any]:
        """Return what a checkpoint holds: where these batches begin, and from which states orders are drawn."""
        now = [generator.get_state() for generator in generators_of(self.source)]
        return {
            "units": {number: self.position(since_begin(number, len(self))) for number in numbers},
            "order": self.order_checksum(),
            "draws_from": {self.drawn_for: self.drawn_from, self.drawn_for + 1: now},
        }

    def go_on(self, record: dict[str, Any], point: ResumePoint, accumulated: int | None) -> tuple[int, bool]:
        """See :func:`lightning_lockstep.loaders.positions.go_on`; ``None``: the batch keeps its number."""
        states = record.get("draws_from", {})
        unit = record.get("units", {}).get(point.seen)
        begins_at = self.position(since_begin(point.seen, len(self))) if unit is None else unit
        batches = self.go_on_at(begins_at, point.epoch, states.get(point.epoch), accumulated or 1)
        is_same = unit is not None and self.order_checksum() == record["order"]
        if accumulated is None:
            return point.seen, is_same and batches == since_begin(point.seen, len(self))
        return batches, is_same

    def go_on_at(self, unit: int, epoch: int, drawn_from: list[Any] | None, accumulated: int) -> int:
        """Resume an epoch after ``unit`` units; return the number of its next batch, which begins an optimizer step."""
        self.set_epoch(epoch)
        self._resumes_at = _Start(epoch, drawn_from or ())
        # A sampler that counts how often it was asked is asked once for an epoch.
        self._is_new = self._is_new and not drawn_from
        self.draw()
        rest = len(bounds(len(self._order) - unit, self._sizes)) - 1
        batches = max(len(self) - rest, 0) // accumulated * accumulated
        self._resumes_at = _Start(epoch, self.drawn_from, unit, batches)
        self._divide(unit, batches)
        return batches

    def compared(self) -> dict[str, Any]:
        """Return what all ranks must have alike, by what it is called."""
        kinds = {"samples": "a DataLoader", "batches": "a batch sampler", "items": "batch_size=None"}
        return {
            "kind": kinds[self.kind],
            self.kind: len(self._order),
            "batch_size": self.batch_size,
            "batches of an epoch": len(self),
            "order of the first epoch": f"{self.order_checksum():08x}",
            "indices of the Subset": _subset_checksum(self._dataset),
        }


def bounds(units: int, sizes: tuple[int, ...]) -> NDArray[Any]:
    """Return where each micro-batch of an epoch begins, and where the last one ends."""
    steps, rest = divmod(units, sum(sizes))
    last = micro_batches(rest, -(-rest // max(sizes)))  # of a last optimizer step that has fewer
    return numpy.concatenate([[0], numpy.tile(sizes, steps), last]).astype(numpy.int64).cumsum()


def _subset_checksum(dataset: Any) -> str | None:
    sums = []
    while isinstance(dataset, Subset):
        sums.append(checksum(numpy.asarray(dataset.indices)))
        dataset = dataset.dataset
    return " of ".join(f"{one:08x}" for one in sums) or None


# -- Dividing a loader --


@dataclass(frozen=True)
class Share:
    """Which part of a loader is wanted, and for what."""

    rank: int
    ranks: int
    trains: bool
    accumulated: int = 1  # micro-batches of an optimizer step
    micro_batches: tuple[int, ...] | None = None  # their samples on all ranks; None: what the loader says
    epoch: int = 0
    by_sample: bool = False  # whether random numbers of a sample are its own


def divided(loader: Any, share: Share) -> Any:
    """Return a loader that gives this rank its part, or the loader itself if it is left alone."""
    kind = kind_of(loader)
    if kind is None:
        return loader
    parts = GlobalBatches(loader, kind, share)
    parts.draw()
    name = "sampler" if kind == "items" else "batch_sampler"
    predicts = type(loader.batch_sampler) is _IndexBatchSamplerWrapper
    made = loader_with(loader, **{name: _IndexBatchSamplerWrapper(parts) if predicts else parts})
    return seeded_by_sample(made, seed_of_run()) if share.by_sample else made


def check_the_same(found: Sequence[dict[str, Any]]) -> None:
    """Raise unless the loaders of all ranks are the same in what each says of its own."""
    names = dict.fromkeys(name for one in found for name in one)
    wrong = [name for name in names if len({one.get(name) for one in found}) > 1]
    if wrong:
        told = "; ".join(
            f"{name}: " + ", ".join(f"{one.get(name)} on rank {rank}" for rank, one in enumerate(found))
            for name in wrong
        )
        raise ConfigurationError(
            f"The ranks have different loaders ({told}): expected the same data set, sampler and batch size on all"
            " ranks, because one order of samples is divided among them. Seed what is drawn at random, such as"
            " random_split (lightning.seed_everything before it). If each rank has its own part, set"
            " Trainer(use_distributed_sampler=False)."
        )
