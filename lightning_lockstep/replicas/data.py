"""Which batches a rank works on: their checksums, and what the loaders are that they come from."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep._trainer import divides_data
from lightning_lockstep.replicas.checksums import Checksums, can_be_read, folded

#: Batches in a row that are looked at: the first of a fit and of its second epoch, the last before a check.
PROBED = 4
# Two ranks must have had the same batches in so many of these rows, but for the first one.
_ROWS = 2

#: Checksums of batches in a row, a list for each loader.
Row = list[list[int]]


class BatchSum:
    """A checksum of a batch, on its way from the device."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._tensors: Checksums | None = Checksums([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self._texts = [zlib.crc32(repr(leaf).encode()) for leaf in leaves if not isinstance(leaf, Tensor)]
        self._number = 0

    def number(self) -> int:
        """Return it; on a GPU this waits for the device, the first time."""
        if self._tensors is not None:
            self._number, self._tensors = folded([*self._tensors.numbers(), *self._texts]), None
        return self._number


def row_of(sums: Iterable[Iterable[BatchSum]]) -> Row:
    """Return the numbers; on a GPU this waits for the device."""
    return [[one.number() for one in of_loader] for of_loader in sums]


def batch_sums(batch: Any, loaders: int) -> list[BatchSum] | None:
    """Return a checksum of the batch of each loader, or nothing if some of it is unknown.

    What is left where an object is passed over, such as the labels that come with it, may be equal by chance.
    """
    parts = [batch]
    if loaders > 1:
        parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    leaves = [list(_leaves(part)) for part in parts]
    if len(parts) != loaders or not all(_is_known(leaf) for of_part in leaves for leaf in of_part):
        return None
    return [BatchSum(of_part) for of_part in leaves]


def _is_known(leaf: Any) -> bool:
    return (
        can_be_read(leaf)
        if isinstance(leaf, Tensor)
        else isinstance(leaf, (str, bytes, int, float, type(None)))
    )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from _leaves(member)
    else:
        yield value


class BatchRecorder:
    """Checksums of the batches of this rank, and whether a second epoch repeats the first."""

    def __init__(self, trainer: Any, every_n_steps: int) -> None:
        self._trainer, self._every = trainer, every_n_steps
        combined = trainer.fit_loop._combined_loader
        loaders = combined.flattened
        self._parts = 1 if combined._mode == "sequential" else len(loaders)
        self._row: list[list[BatchSum]] = [[] for _ in range(self._parts)]
        self._epochs: dict[int, list[list[BatchSum]]] = {}
        # Ranks that share one model, as in tensor parallelism, have the same batches too.
        samplers = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        shares = samplers.get("num_replicas", trainer.world_size)
        self.active = (
            self._parts == len(loaders) and not trainer.overfit_batches and shares == trainer.world_size
        )

    def take(self, batch: Any, number: int, index: int) -> str | None:  # in the fit, and in its epoch
        """Look at a batch, before its step, if it is time to; returns a warning, or nothing."""
        if not self.active:
            return None
        epoch = self._trainer.current_epoch
        early = index < PROBED and (epoch in self._epochs or len(self._epochs) < 2)
        before_check = number < PROBED or -(number + 1) % self._every < PROBED
        if not early and not before_check:
            return None
        sums = batch_sums(batch, self._parts)
        if sums is None:
            self.active = False
            return None
        if before_check:
            for row, one in zip(self._row, sums, strict=True):
                row.append(one)
                del row[:-PROBED]
        if not early:
            return None
        rows = self._epochs.setdefault(epoch, [[] for _ in range(self._parts)])
        for row, one in zip(rows, sums, strict=True):
            row.append(one)
        last = min(PROBED, self._trainer.num_training_batches) - 1
        return self._repeated(epoch) if index == last else None

    def row(self) -> list[list[BatchSum]]:
        """Return the last batches, and begin another row if it will be as long."""
        row = [list(sums) for sums in self._row]
        if self._every >= PROBED:
            self._row = [[] for _ in range(self._parts)]
        return row

    def _repeated(self, epoch: int) -> str | None:
        if epoch - 1 not in self._epochs:
            return None
        before = row_of(self._epochs[epoch - 1])
        for number, row in enumerate(row_of(self._epochs[epoch])):
            # Of fewer batches the same order is no rarity.
            if before[number] != row or len(set(row)) < PROBED:
                continue
            if _shuffles(loader := self._trainer.fit_loop._combined_loader.flattened[number]):
                return (
                    f"ReplicaCheck: epoch {epoch} began with the same batches in the same order as epoch {epoch - 1},"
                    f" though {_named(number, self._parts)} shuffles. {_described(loader)} Call"
                    " its set_epoch(epoch) at the start of each epoch, as Lightning does for what it finds as"
                    " loader.sampler or loader.batch_sampler.sampler."
                )
        return None


class BatchComparison:
    """On rank 0: which ranks have worked on the same batches."""

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[int, tuple[int, ...]], int] = {}
        self._is_first = True

    def compare(self, rows: Mapping[int, Row]) -> tuple[int, tuple[int, ...]] | None:
        """Return the number of a loader and the ranks to which it gives the same batches, if it does."""
        if min((len(sums) for row in rows.values() for sums in row), default=0) < 2:
            return None
        first, self._is_first = self._is_first, False
        same: dict[tuple[int, tuple[int, ...]], int] = {}
        for loader in range(min(map(len, rows.values()), default=0)):
            ranks_of: dict[tuple[int, ...], list[int]] = {}
            for rank, row in rows.items():
                ranks_of.setdefault(tuple(row[loader]), []).append(rank)
            for sums, ranks in ranks_of.items():
                # All batches of a rank are the same too: constant data, or a single batch.
                if len(ranks) > 1 and len(set(sums)) > 1:
                    key = loader, tuple(ranks)
                    same[key] = self._in_a_row.get(key, 0) + 1
        self._in_a_row = same
        return next((key for key, count in same.items() if first or count >= _ROWS), None)


def same_batches_text(trainer: Any, number: int, ranks: Sequence[int]) -> str:
    """Return what is wrong with a loader that gives several ranks the same batches, and what to write.

    Nothing where the data set has fewer samples than there are ranks, so that samplers repeat some.
    """
    loaders = trainer.fit_loop._combined_loader.flattened
    loader = loaders[number]
    dataset = getattr(loader, "dataset", None)
    with contextlib.suppress(TypeError, NotImplementedError):
        if not isinstance(dataset, IterableDataset) and len(dataset) < trainer.world_size:  # type: ignore[arg-type]
            return ""
    if isinstance(dataset, IterableDataset):
        advice = (
            "Give the strategy iterable_datasets='shard', by which a strategy of lightning-lockstep divides it, or let"
            " its __iter__ yield each rank's share, such as itertools.islice(samples, rank, None, world_size) with rank"
            " and world_size from torch.distributed, and of that each worker's (torch.utils.data.get_worker_info)"
        )
    elif not divides_data(trainer):
        advice = (
            "use_distributed_sampler=False was given to the Trainer: leave it out, or make the loader with"
            " sampler=DistributedSampler(dataset)"
        )
    elif _sampler(loader) is None:
        advice = (
            "Lightning puts a sampler into a DataLoader of torch alone: give each rank its share by its rank"
        )
    else:
        advice = "Give each rank its share of the samples: your own sampler must go by the rank"
    return (
        f"{ranks_in_words(ranks)} work on the same batches: {_named(number, len(loaders))} gives them to each."
        f" {_described(loader)} {advice}."
    )


def _named(number: int, count: int) -> str:
    return "the training loader" if count == 1 else f"training loader {number} of {count}"


def _described(loader: Any) -> str:
    dataset, sampler = getattr(loader, "dataset", None), _sampler(loader)
    if isinstance(dataset, IterableDataset):
        return f"Its data set {type(dataset).__name__} is iterable, so that Lightning puts no DistributedSampler in."
    given = f"without a DistributedSampler (its sampler: {type(sampler).__name__})"
    if isinstance(sampler, DistributedSampler):
        given = f"with a {type(sampler).__name__} for rank {sampler.rank} of {sampler.num_replicas}"
    return f"Its data set {type(dataset).__name__} is not iterable, {given}."


def _sampler(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", None) or getattr(loader, "sampler", None)


def _shuffles(loader: Any) -> bool:
    parts = (_sampler(loader), getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
    return any(isinstance(part, RandomSampler) or getattr(part, "shuffle", False) is True for part in parts)
