"""Exact checksums of tensors, 64 bits for each, computed on its device, and of the batches that a rank works on."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.numerics.statistics import output_values

# -- Of the bits of a tensor, and their positions --

# This many words of 64 bits are read at once: with the weights and a copy of them they stay in the cache of a core, and
# a check needs no other memory. A GPU takes more, because it would mostly wait for the next call.
_WORDS, _WORDS_OF_GPU = 2**15, 2**20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of SplitMix64


class Checksums:
    """Checksums of the bits of tensors by name, on their way from the devices."""

    # Whatever the bits mean as values: a nan equals itself, and zero differs from minus zero.

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._names = list(named)
        self._parts: list[tuple[list[str], Tensor]] = []  # of each device
        self._events: list[torch.cuda.Event] = []  # of each GPU
        places: dict[torch.device, list[str]] = {}
        for name, tensor in named.items():
            places.setdefault(tensor.device, []).append(name)
        for names in places.values():
            sums = torch.stack([_checksum(named[name]) for name in names])
            self._parts.append((names, self._to_host(sums)))

    def _to_host(self, sums: Tensor) -> Tensor:
        if sums.device.type == "cpu":
            return sums
        on_host = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(sums.device))
        self._events.append(event)
        return on_host

    def ready(self) -> bool:
        """Return whether :meth:`numbers` would not wait."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def numbers(self) -> dict[str, int]:
        """Return them by name, in the order of the tensors."""
        for event in self._events:
            event.synchronize()
        found: dict[str, int] = {}
        for names, sums in self._parts:
            found |= zip(names, sums.tolist(), strict=True)
        return {name: found[name] for name in self._names}


def can_be_read(tensor: Tensor) -> bool:
    """Return whether a tensor itself holds its values, in memory."""
    return not (
        is_lazy(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_quantized
        or hasattr(tensor, "__tensor_flatten__")  # made of other tensors, such as DTensor
    )


def folded(values: Iterable[object]) -> int:
    """Return one number for several numbers or texts; a different one if any of them, or their order, differs."""
    text = ",".join(map(str, values))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor, on its device."""
    with torch.no_grad():
        words, rest = _words(tensor)
        weights = _weights(words.device)
        total = words.new_zeros((), dtype=torch.int64)
        # What fills no word comes last. The total is multiplied for each piece, so that two pieces cannot change places
        # unseen.
        for piece in (*torch.split(words, len(weights) * 8 // words.element_size()), rest):
            if len(piece):
                aligned = piece if piece.dtype is torch.int64 else _aligned(piece)
                # Shift the highest bits down, because a multiplication does not carry them to lower ones.
                mixed = (aligned >> 33).bitwise_xor_(aligned)
                own = weights[: len(mixed)]
                total = total * _MULTIPLIERS[0]
                total += torch.dot(mixed, own) if mixed.is_cpu else mixed.mul_(own).sum()
        return total


def _aligned(piece: Tensor) -> Tensor:
    """Return smaller integers as words: a copy of them, or if they do not fill whole words, a word for each."""
    whole = len(piece) * piece.element_size() % 8 == 0
    return piece.clone().view(torch.int64) if whole else piece.long()


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor as integers in the order in which they lie in memory: what fills words, and the rest."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    if flat.device.type not in ("cpu", "cuda"):
        flat = flat.cpu()  # XLA: integers of 64 bits and views of bits would be one more program to compile
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    if not flat.is_contiguous():  # such as channels_last
        order = sorted(range(flat.dim()), key=flat.stride().__getitem__, reverse=True)
        flat = flat.permute(order).contiguous()
    flat = flat.view(-1).view(_INTEGERS[flat.element_size()])
    in_word = 8 // flat.element_size()
    whole = len(flat) - len(flat) % in_word
    words = flat[:whole]
    # A gradient in a bucket, or a tensor in a mapped file, may begin in the middle of a word.
    if not (words.storage_offset() % in_word or words.data_ptr() % 8):
        words = words.view(torch.int64)
    return words, flat[whole:]


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers, one for each position, that look random and are the same on every rank."""
    count = _WORDS if device.type == "cpu" else _WORDS_OF_GPU
    number = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MULTIPLIERS[0]
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
        number = (number ^ (number >> shift)) * multiplier
    return number | 1


# -- Which batches a rank works on: their checksums, and what the loaders are that they come from --

#: Batches in a row that are looked at: the first of a fit, the last before a check.
PROBED = 4
# Two ranks must have the same batches in this many rows one after the other; in the first row, once is enough.
_ROWS = 2

#: Checksums of batches in a row, a list for each loader.
Row = list[list[int]]


def row_of(sums: Iterable[Iterable[Checksums]]) -> Row:
    """Return the numbers; on a GPU this waits for the device."""
    return [[folded(one.numbers().values()) for one in of_loader] for of_loader in sums]


def batch_sums(batch: Any, loaders: int) -> list[Checksums] | None:
    """Return checksums of the batch of each loader, or nothing if some of it is unknown."""
    # Without the unknown part, the rest of a batch, such as its labels, may be equal by chance.
    parts = [batch]
    if loaders > 1:
        parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    leaves = [[leaf for _, leaf in output_values(part)] for part in parts]
    if len(parts) != loaders or not all(_is_known(leaf) for of_part in leaves for leaf in of_part):
        return None
    return [Checksums({str(place): _tensor_of(leaf) for place, leaf in enumerate(one)}) for one in leaves]


def _tensor_of(leaf: Any) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else torch.tensor(zlib.crc32(repr(leaf).encode()))


def _is_known(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return can_be_read(leaf)
    return isinstance(leaf, (str, bytes, int, float, type(None)))


class BatchRecorder:
    def __init__(self, trainer: Any, every_n_steps: int, *, active: bool) -> None:
        self._every = every_n_steps
        combined = trainer.fit_loop._combined_loader
        loaders = combined.flattened
        self._parts = 1 if combined._mode == "sequential" else len(loaders)
        self._row: list[list[Checksums]] = [[] for _ in range(self._parts)]
        # Ranks that share one model, as in tensor parallelism, have the same batches too.
        samplers = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        shares = samplers.get("num_replicas", trainer.world_size)
        is_known = self._parts == len(loaders) and not trainer.overfit_batches
        self.active = active and is_known and shares == trainer.world_size

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

    def row(self) -> list[list[Checksums]]:
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
    advice = "has an index: leave out use_distributed_sampler=False, or let your sampler depend on the rank"
    if streams:
        advice = "is iterable: give the strategy iterable_datasets='shard', or let its __iter__ yield each rank's share"
    loader = "the training loader" if len(loaders) == 1 else f"training loader {number} of {len(loaders)}"
    return (
        f"{ranks_in_words(ranks)} work on the same batches: {loader} gives them to each. Its data set"
        f" {type(dataset).__name__} {advice}."
    )
