"""An iterable data set that would give every rank the same samples, divided among ranks and DataLoader workers.

Every reader (a worker of a rank, or a rank without workers) reads the whole stream as one process would, with random
numbers that all readers share, and cuts it into global batches. Worker ``w`` of ``W`` makes the batches ``w``,
``w + W``, and so on, which is the order in which a DataLoader takes them, and keeps its rank's part of each,
``batch[rank::ranks]``. So each sample is used once, all ranks have the same number of batches, and every rank knows the
sizes of all parts without a message. A rank that has no sample of the last one gets a padding sample, which must not count.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_lockstep._doors.torch_internals import as_worker, forget_iterator
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import LoaderAround
from lightning_lockstep.steps.snapshot import RandomState

# What divides samples among the ranks: data sets, data pipes, and a stage of webdataset's pipelines.
_DIVIDERS = {
    *("streaming.StreamingDataset", "litdata.StreamingDataset", "litdata.CombinedStreamingDataset"),
    *("torch.ShardingFilterIterDataPipe", "webdataset.ResampledShards", "webdataset.split_by_node"),
}
_CPU = torch.device("cpu")


def shared_stream(
    loader: Any,
    communicator: Communicator,
    *,
    rank: int,
    ranks: int,
    trains: bool,
    micro_batches: Sequence[int] | None = None,
    ahead: Callable[[], int] = lambda: 1,
) -> Any:
    """Return a loader that gives this rank its part of a stream, or the loader itself. Ranks: all; a gather."""
    # `micro_batches`: samples of all ranks in each micro-batch of an optimizer step, in turn; None: what the loader
    # says. `ahead`: how many batches are read before the first of them is given, so that the sizes of all are known.
    wholes: tuple[int, ...] | None = None
    if type(loader).__iter__ is DataLoader.__iter__ and isinstance(loader.dataset, IterableDataset):
        if not divides_itself(loader.dataset):
            wholes = tuple(micro_batches or ((loader.batch_size or 1) * ranks,))
    found = communicator.gather(wholes)
    if len(set(found)) > 1:
        told = ", ".join(f"rank {i}: {'none' if one is None else one[0]}" for i, one in enumerate(found))
        raise ConfigurationError(
            f"The ranks divide a stream into global batches of different sizes ({told}): expected a DataLoader with the"
            " same data set and batch_size on all ranks."
        )
    if wholes is None:
        return loader
    batches = StreamBatches(wholes, rank, ranks, in_workers=loader.num_workers > 0)
    parts = _Parts(loader, batches, least=0 if trains or loader.drop_last else ranks)
    return SharedStream(_reading(loader, parts), parts, loader, ahead)


def divides_itself(dataset: Any) -> bool:
    """Return whether it is known that a data set, or one that it reads from, gives each rank its own samples."""
    parts = [dataset]
    for part in parts:  # grows meanwhile
        kinds = type(part).__mro__ if isinstance(part, IterableDataset) else (part,)
        names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in kinds}
        # datasets.distributed.split_dataset_by_node leaves no other sign.
        if names & _DIVIDERS or getattr(part, "_distributed", None):
            return True
        for value in vars(part).values() if isinstance(part, IterableDataset) else ():
            for one in itertools.islice(value, 100) if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, (IterableDataset, FunctionType)) and not any(
                    one is known for known in parts
                ):
                    parts.append(one)
    return False


class StreamBatches:
    """What is known of the global batches of a stream; in the place of a batch sampler, and of its sampler.

    A size is exact for a batch that was read, and for those before it. A batch behind the end has no samples; one that
    has not been read counts as full.
    """

    def __init__(self, wholes: Sequence[int], rank: int, ranks: int, *, in_workers: bool = False) -> None:
        self._wholes, self.rank, self.ranks = tuple(wholes), rank, ranks
        self._others: dict[int, int] = {}  # sizes of batches that are not full
        self._count = sys.maxsize  # of batches
        self._epoch = torch.zeros(1, dtype=torch.int64)
        if in_workers:  # which may be there already
            self._epoch.share_memory_()

    def __len__(self) -> int:
        """Return a number that no stream reaches: how many batches there are is not known."""
        return sys.maxsize

    @property
    def sampler(self) -> StreamBatches:
        """What Lightning tells the epoch."""
        return self

    @property
    def epoch(self) -> int:
        """Number of the epoch, by which a stream is shuffled."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch, from the next beginning of the stream on."""
        self._epoch.fill_(epoch)

    def full_batches(self, samples: int) -> tuple[int, int]:
        """Return how many full batches there are of so many samples, and how many samples are left."""
        turns, rest = divmod(samples, sum(self._wholes))
        ends = list(itertools.accumulate(self._wholes))
        count = sum(end <= rest for end in ends)
        return turns * len(ends) + count, rest - sum(self._wholes[:count])

    def whole(self, number: int) -> int:
        """Return how many samples of all ranks a full batch has."""
        return self._wholes[number % len(self._wholes)]

    def sizes(self, number: int) -> tuple[int, int]:
        """Return how many samples of batch ``number`` are this rank's, and all ranks'."""
        total = 0 if number >= self._count else self._others.get(number, self.whole(number))
        return len(range(self.rank, total, self.ranks)), total

    def note(self, number: int, total: int) -> None:
        """Note the size of a batch that was read; 0 at the end."""
        self._others.pop(number, None)
        if total == 0:
            self._count = number
        elif number >= self._count:  # this time there are more than before
            self._count = sys.maxsize
        if total not in (0, self.whole(number)):
            self._others[number] = total


class SharedStream(LoaderAround):
    """Gives the batches of a rank's parts, of which ``batch_sampler`` knows the sizes."""

    _least: int
    _ahead: Callable[[], int]

    def __init__(
        self, made: DataLoader[Any], parts: _Parts, given: DataLoader[Any], ahead: Callable[[], int]
    ) -> None:
        shown = {"dataset": given.dataset, "batch_size": given.batch_size, "drop_last": given.drop_last}
        batches = parts.batches
        super().__init__(
            made, batch_sampler=batches, sampler=batches, _least=parts.least, _ahead=ahead, **shown
        )

    def __len__(self) -> int:
        count, rest = self.batch_sampler.full_batches(len(self.dataset))
        return count + (rest > 0 and not self.drop_last and (count == 0 or rest >= self._least))

    def __iter__(self) -> Iterator[Any]:
        read: deque[Any] = deque()
        number = -1
        for number, (total, batch) in enumerate(self._loader):
            self.batch_sampler.note(number, total)
            read.append(batch)
            while len(read) >= max(self._ahead(), 1):
                yield read.popleft()
        self.batch_sampler.note(number + 1, 0)
        yield from read


# -- In a reader --


class _Parts(IterableDataset[Any]):
    """Gives a worker of a rank the parts of the global batches that are its turn, each with the size of the whole."""

    def __init__(self, loader: DataLoader[Any], batches: StreamBatches, *, least: int) -> None:
        self.dataset, self.batches = loader.dataset, batches
        self.least = least  # a last batch of fewer samples is put into the one before
        self._drop_last = loader.drop_last
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # as that of Lightning's DistributedSampler

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        info, batches = get_worker_info(), self.batches
        turn, turns = (0, 1) if info is None else (info.id, info.num_workers)
        stream = _AloneStream(self.dataset, batches.epoch, (self._seed + batches.epoch) % 2**32)
        following: list[Any] = []
        for number in itertools.count():
            whole = batches.whole(number)
            batch = following + stream.read(whole - len(following))
            following = stream.read(self.least)
            if len(following) < self.least:
                batch, following = batch + following, []
            if not batch or (self._drop_last and len(batch) < whole):
                return
            if number % turns == turn:
                yield len(batch), batch[batches.rank :: batches.ranks] or batch[:1]


class _AloneStream:
    """Reads a data set as one process alone would, with random numbers of its own."""

    def __init__(self, dataset: Any, epoch: int, seed: int) -> None:
        self._dataset, self._seed, self._random = dataset, seed, None
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
        before = RandomState.capture(_CPU)
        if self._random is None:
            torch.default_generator.manual_seed(self._seed)
            random.seed(self._seed)
            numpy.random.seed(self._seed)  # this is what data sets draw from
        else:
            self._random.restore()
        try:
            with _only_worker(self._dataset, self._seed):
                yield
        finally:
            self._random = RandomState.capture(_CPU)
            before.restore()


@contextmanager
def _only_worker(dataset: Any, seed: int) -> Iterator[None]:
    """Let what divides samples by ``get_worker_info`` find one worker, in a worker."""
    info = get_worker_info()
    if info is None:
        yield
        return
    with as_worker(type(info)(id=0, num_workers=1, seed=seed, dataset=dataset)):
        yield


def _begin_worker(begin: Callable[[int], None], number: int) -> None:
    """Call the ``worker_init_fn`` of a loader."""
    info: Any = get_worker_info()
    with _only_worker(info.dataset.dataset, info.seed):
        begin(number)


def _collated(collate: Callable[[Any], Any], is_ready: bool, part: tuple[int, list[Any]]) -> tuple[int, Any]:
    """Return the size of a global batch, and what a loader makes of this rank's samples."""
    total, samples = part
    return total, collate(samples[0] if is_ready else samples)


def _reading(loader: DataLoader[Any], parts: _Parts) -> DataLoader[Any]:
    """Return a loader like ``loader`` that reads parts, each of which is a batch."""
    made = copy.copy(loader)  # the program may use its own for something else
    forget_iterator(made)
    collate = partial(_collated, loader.collate_fn, loader.batch_size is None)
    begin = loader.worker_init_fn and partial(_begin_worker, loader.worker_init_fn)
    # DataLoader refuses some of these by its own __setattr__, since it could not check what it gets. Parts of one
    # optimizer step have to come together on all ranks, so in order.
    own = {"dataset": parts, "collate_fn": collate, "worker_init_fn": begin, "in_order": True}
    vars(made).update(own, batch_size=None, batch_sampler=None, drop_last=False)
    return made
