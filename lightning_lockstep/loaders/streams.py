"""An iterable data set that would give every rank the same samples, divided among ranks and DataLoader workers.

Every reader (a worker of a rank, or a rank without workers) reads the whole stream as one process would, with random
numbers that all readers share, and cuts it into global batches. Worker ``w`` of ``W`` makes the batches ``w``,
``w + W``, and so on, which is the order in which a DataLoader takes them, and keeps its rank's part of each,
``batch[rank::ranks]``. So each sample is used once, all ranks have the same number of batches, and every rank knows the
sizes of all parts without a message. A rank without a sample in a batch gets a padding sample, which must not count.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_lockstep.loaders.global_order import seed_of_run
from lightning_lockstep.steps.patching import LoaderAround, loader_with, replaced
from lightning_lockstep.steps.snapshot import OwnNumbers

# Classes and functions that divide samples among the ranks themselves: data sets, data pipes, a stage of webdataset.
_DIVIDERS = {
    *("streaming.StreamingDataset", "litdata.StreamingDataset", "litdata.CombinedStreamingDataset"),
    *("torch.ShardingFilterIterDataPipe", "webdataset.ResampledShards", "webdataset.split_by_node"),
}


def shared_stream(
    loader: Any, rank: int, ranks: int, *, trains: bool = True, ahead: Callable[[], int] = lambda: 1
) -> Any:
    """Return a loader that gives this rank its part of a stream, or the loader itself."""
    # `ahead`: how many batches are read before the first of them is given, so that the sizes of all these are known.
    if not is_plain_loader(loader) or not isinstance(loader.dataset, IterableDataset):
        return loader
    if divides_itself(loader.dataset):
        return loader
    parts = StreamParts(loader, rank, ranks, trains=trains)
    begin = loader.worker_init_fn and partial(_begin_worker, loader.worker_init_fn)
    # Parts come in order, because all ranks give their parts of a batch together. A part needs no collating.
    own = {"dataset": parts, "collate_fn": tuple, "worker_init_fn": begin, "in_order": True}
    reading = loader_with(loader, **own, batch_size=None, batch_sampler=None, drop_last=False)
    return SharedStream(reading, loader, parts, ahead)


def is_plain_loader(loader: Any) -> bool:
    """Return whether a loader gives its batches as a DataLoader does."""
    return getattr(type(loader), "__iter__", None) is DataLoader.__iter__


def divides_itself(dataset: Any) -> bool:
    """Return whether a data set, or one that it reads from, is known to give each rank its own samples."""
    parts = [dataset]
    for part in parts:  # the list grows during the loop
        kinds = type(part).__mro__ if isinstance(part, IterableDataset) else (part,)
        names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in kinds}
        # `_distributed` is the only sign that datasets.distributed.split_dataset_by_node leaves.
        if names & _DIVIDERS or getattr(part, "_distributed", None):
            return True
        for value in vars(part).values() if isinstance(part, IterableDataset) else ():
            members = value[:100] if isinstance(value, (list, tuple)) else (value,)
            kept = [one for one in members if isinstance(one, (IterableDataset, FunctionType))]
            parts += [one for one in kept if not any(one is known for known in parts)]
    return False


class SharedStream(LoaderAround):
    """Gives the batches of a rank's parts, of which ``batch_sampler.sizes`` knows the sizes."""

    _ahead: Callable[[], int]

    def __init__(self, made: Any, given: DataLoader[Any], parts: StreamParts, ahead: Callable[[], int]) -> None:
        shown = {"dataset": given.dataset, "batch_size": given.batch_size, "drop_last": given.drop_last}
        super().__init__(made, batch_sampler=parts, sampler=parts, _ahead=ahead, **shown)

    def __len__(self) -> int:
        parts = self.batch_sampler
        count = -(-(len(self.dataset) // parts.multiple * parts.multiple) // parts.global_batch)
        return int(count - self._surplus(count))

    def _surplus(self, count: int) -> int:
        """Return how many of `count` batches do not fill an optimizer step; none if the loader drops none."""
        return count % max(self._ahead(), 1) if self.drop_last else 0

    def __iter__(self) -> Iterator[Any]:
        parts, ready = self.batch_sampler, deque[Any]()
        parts.totals, parts.ended = [], False
        for total, batch in self._loader:
            parts.totals.append(total)
            ready.append(batch)
            while len(ready) >= max(self._ahead(), 1):
                yield ready.popleft()
        parts.ended = True
        yield from itertools.islice(ready, len(ready) - self._surplus(len(parts.totals)))


class StreamParts(IterableDataset[Any]):
    """A rank's parts of the global batches of a stream, each with the size of the whole batch."""

    # Each reader has a copy. In the rank's own process this object also stands for the loader's sampler and batch
    # sampler. The size of a batch is exact once it was read; until then it counts as full, or as empty after the end.

    def __init__(self, loader: DataLoader[Any], rank: int, ranks: int, *, trains: bool) -> None:
        self.dataset = loader.dataset
        self.global_batch = (loader.batch_size or 1) * ranks  # [samples]
        self._rank, self._ranks = rank, ranks
        # With drop_last, what does not fill a global batch is dropped; in an evaluation, a batch of one process.
        size = self.global_batch if trains else loader.batch_size or 1
        self.multiple = size if loader.drop_last else 1
        self._collate, self._makes_batches = loader.collate_fn, loader.batch_size is not None
        self.seed = seed_of_run()
        self._epoch = torch.zeros(1, dtype=torch.int64)
        if loader.num_workers:  # which may have been started when the epoch is set
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        # Sizes of the batches of this epoch that were read, and whether all were.
        self.totals, self.ended = list[int](), False

    def __len__(self) -> int:
        """Return a number that no stream reaches, because the number of batches is not known."""
        return sys.maxsize

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch when the stream is read from its beginning the next time."""
        self._epoch.fill_(epoch)

    def sizes(self, number: int) -> tuple[int, int]:
        """Return how many samples of batch ``number`` are this rank's, and all ranks'."""
        unread = 0 if self.ended else self.global_batch
        total = self.totals[number] if number < len(self.totals) else unread
        return len(range(self._rank, total, self._ranks)), total

    @property
    def sizes_known(self) -> bool:
        """Whether ``sizes`` counts samples; what the stream gives may be batches."""
        return self._makes_batches

    def compared(self) -> dict[str, Any]:
        """Return what all ranks must have alike, by what it is called."""
        return {"kind": "a stream", "samples of a global batch": self.global_batch}

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield the parts that are this worker's turn."""
        info, epoch = get_worker_info(), int(self._epoch)
        turn, turns = (0, 1) if info is None else (info.id, info.num_workers)
        stream = _WholeStream(self.dataset, epoch, (self.seed + epoch) % 2**32)
        for number in itertools.count():
            batch = stream.read(self.global_batch)
            batch = batch[: len(batch) // self.multiple * self.multiple]
            if not batch:
                return
            if number % turns == turn:
                part = batch[self._rank :: self._ranks] or batch[:1]
                yield len(batch), self._collate(part if self._makes_batches else part[0])


class _WholeStream:
    """Reads a data set as one process would, with random numbers of its own."""

    def __init__(self, dataset: Any, epoch: int, seed: int) -> None:
        self._dataset, self._seed, self._numbers = dataset, seed, OwnNumbers(seed)
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)
        if isinstance(generator := getattr(dataset, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        with self._alone():
            self._samples = iter(dataset)

    def read(self, count: int) -> list[Any]:
        """Return the next samples, at the end fewer."""
        with self._alone():
            return list(itertools.islice(self._samples, count))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._numbers.used(), _as_only_worker(self._dataset, self._seed):
            yield


def _as_only_worker(dataset: Any, seed: int) -> AbstractContextManager[None]:
    """Let ``get_worker_info`` report a single worker, if this process is a worker: data sets divide samples by it."""
    # What `get_worker_info` returns can only be set by a private name.
    holder: Any = torch.utils.data._utils.worker
    info = holder._worker_info
    single_worker = info and type(info)(id=0, num_workers=1, seed=seed, dataset=dataset)
    return replaced(holder, _worker_info=single_worker)


def _begin_worker(begin: Callable[[int], None], number: int) -> None:
    """Call the ``worker_init_fn`` of a loader, which may divide the data set too."""
    info: Any = get_worker_info()
    with _as_only_worker(info.dataset.dataset, info.seed):
        begin(number)
