"""Which batches a rank works on: their checksums, and what the loaders are that they come from."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.numerics.statistics import output_values
from lightning_lockstep.replicas.checksums import Checksums, can_be_read, folded

#: Batches in a row that are looked at: the first of a fit, the last before a check.
PROBED = 4
# Two ranks must have the same batches in so many rows one after the other; in the first row, once is enough.
_ROWS = 2

#: Checksums of batches in a row, a list for each loader.
Row = list[list[int]]


class BatchSum:
    """A checksum of a batch, on its way from the device."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._tensors = Checksums(
            {str(place): leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        )
        self._texts = [zlib.crc32(repr(leaf).encode()) for leaf in leaves if not isinstance(leaf, Tensor)]

    @cached_property
    def number(self) -> int:
        """The checksum itself; on a GPU this waits for the device, the first time."""
        return folded([*self._tensors.numbers().values(), *self._texts])


def row_of(sums: Iterable[Iterable[BatchSum]]) -> Row:
    """Return the numbers; on a GPU this waits for the device."""
    return [[one.number for one in of_loader] for of_loader in sums]


def batch_sums(batch: Any, loaders: int) -> list[BatchSum] | None:
    """Return a checksum of the batch of each loader, or nothing if some of it is unknown."""
    # Without the unknown part, the rest of a batch, such as its labels, may be equal by chance.
    parts = [batch]
    if loaders > 1:
        parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    leaves = [[leaf for _, leaf in output_values(part)] for part in parts]
    if len(parts) != loaders or not all(_is_known(leaf) for of_part in leaves for leaf in of_part):
        return None
    return [BatchSum(of_part) for of_part in leaves]


def _is_known(leaf: Any) -> bool:
    return (
        can_be_read(leaf)
        if isinstance(leaf, Tensor)
        else isinstance(leaf, (str, bytes, int, float, type(None)))
    )


class BatchRecorder:
    """Checksums of the batches of this rank."""

    def __init__(self, trainer: Any, every_n_steps: int) -> None:
        self._every = every_n_steps
        combined = trainer.fit_loop._combined_loader
        loaders = combined.flattened
        self._parts = 1 if combined._mode == "sequential" else len(loaders)
        self._row: list[list[BatchSum]] = [[] for _ in range(self._parts)]
        # Ranks that share one model, as in tensor parallelism, have the same batches too.
        samplers = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        shares = samplers.get("num_replicas", trainer.world_size)
        self.active = (
            self._parts == len(loaders) and not trainer.overfit_batches and shares == trainer.world_size
        )

    def take(self, batch: Any, number: int) -> None:  # of the fit
        """Look at a batch, before its step, if a check follows soon."""
        if not self.active or (number >= PROBED and -(number + 1) % self._every >= PROBED):
            return
        sums = batch_sums(batch, self._parts)
        if sums is None:
            self.active = False
            return
        for row, one in zip(self._row, sums, strict=True):
            row.append(one)
            del row[:-PROBED]

    def row(self) -> list[list[BatchSum]]:
        """Return the last batches, and begin a new row if it will be as long."""
        row = [list(sums) for sums in self._row]
        if self._every >= PROBED:
            self._row = [[] for _ in range(self._parts)]
        return row


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
    """Return what is wrong with a loader that gives several ranks the same batches, and what to write."""
    loaders = trainer.fit_loop._combined_loader.flattened
    dataset = getattr(loaders[number], "dataset", None)
    streams = isinstance(dataset, IterableDataset)
    with contextlib.suppress(TypeError, NotImplementedError):
        if not streams and len(dataset) < trainer.world_size:  # type: ignore[arg-type]
            return ""  # samplers repeat some samples then
    advice = "has an index: let the Trainer add the sampler (no use_distributed_sampler=False, a DataLoader of torch),"
    advice += " or let your own sampler depend on the rank"
    if streams:
        advice = "is iterable: give the strategy iterable_datasets='shard', or let its __iter__ yield each rank's share"
    loader = "the training loader" if len(loaders) == 1 else f"training loader {number} of {len(loaders)}"
    return (
        f"{ranks_in_words(ranks)} work on the same batches: {loader} gives them to each. Its data set"
        f" {type(dataset).__name__} {advice}."
    )
