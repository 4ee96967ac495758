"""Exact checksums of tensors: a 64-bit number for each, of its bits and their positions, computed on its device."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

# Words of 64 bits that are taken at once: with the weights and a copy of them they stay in the cache of a core, and are
# all the memory that a check needs. A GPU would mostly wait for the next call.
_WORDS, _WORDS_OF_GPU = 2**15, 2**20
# A tensor of so many words goes through one buffer with others: a call each would cost more than reading it.
_FEW = 2**11
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of SplitMix64


class _Bits(NamedTuple):
    """A tensor as integers, in the order in which they lie in memory."""

    tensor: Tensor
    address: int
    words: Tensor  # of 64 bits; smaller ones, for as many whole words, where it does not begin at one
    rest: Tensor  # what fills no word
    lengths: tuple[int, int]  # of both; asking a tensor for its length takes as long as to read a small one


class BitViews:
    """Views of tensors as integers, kept for the next time: making them costs more than reading small tensors."""

    def __init__(self) -> None:
        self._known: list[_Bits] = []

    def of(self, tensors: Sequence[Tensor]) -> list[_Bits]:
        known = self._known
        found = [
            known[index]
            if index < len(known)
            and known[index].tensor is tensor
            and known[index].address == tensor.data_ptr()
            else _bits(tensor)
            for index, tensor in enumerate(tensors)
        ]
        # A copy would be old the next time, and take as much memory as the tensor until then.
        self._known = [bits if bits.tensor.is_contiguous() else _NOTHING for bits in found]
        return found


class Checksums:
    """Checksums of a list of tensors, on their way from the devices.

    Equal bits give equal numbers, whatever they mean as values: a nan equals itself, and zero differs from minus zero.
    """

    def __init__(self, tensors: Sequence[Tensor], views: BitViews | None = None) -> None:
        self._count = len(tensors)
        self._parts: list[tuple[list[int], Tensor]] = []
        self._events: list[torch.cuda.Event] = []  # of each GPU
        places: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            places.setdefault(tensor.device, []).append(index)
        for device, indices in places.items():
            if device.type not in ("cpu", "cuda"):
                # XLA: integers of 64 bits and views of bits would be one more program to compile.
                sums = torch.cat([_checksums([_bits(tensors[index].detach().cpu())]) for index in indices])
                self._parts.append((indices, sums))
                continue
            own = views if views is not None and len(places) == 1 else BitViews()
            sums = _checksums(own.of([tensors[index] for index in indices]))
            self._parts.append((indices, self._to_host(device, sums)))

    def _to_host(self, device: torch.device, sums: Tensor) -> Tensor:
        if device.type == "cpu":
            return sums
        on_host = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._events.append(event)
        return on_host

    def ready(self) -> bool:
        """Return whether :meth:`numbers` would not wait."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def numbers(self) -> list[int]:
        """Return them in the order of the tensors."""
        for event in self._events:
            event.synchronize()
        found = [0] * self._count
        for indices, sums in self._parts:
            for index, number in zip(indices, sums.tolist(), strict=True):
                found[index] = number
        return found


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
    """Return one number for several numbers or texts; another one if any of them, or their order, is another."""
    text = ",".join(map(str, values))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _checksums(tensors: Sequence[_Bits]) -> Tensor:
    """Return the checksums of tensors of one device, on that device."""
    device = tensors[0].words.device
    weights = _weights(device)
    spare = torch.empty_like(weights)
    total = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    sums: list[Tensor] = []
    owners: list[int] = []
    few: dict[torch.dtype, list[tuple[int, Tensor, int]]] = {}
    for owner, (_, _, words, rest, (length, rest_length)) in enumerate(tensors):
        if rest_length:
            few.setdefault(rest.dtype, []).append((owner, rest, rest_length))
        if length > _FEW:
            for piece in _pieces(words, weights.numel()):
                size = piece.numel()
                sums.append(_weighted_sum(piece, weights[:size], spare[:size]))
                owners.append(owner)
        elif length:
            few.setdefault(torch.int64, []).append((owner, _aligned(words), length))
    if sums:
        # By the position of a piece among all: a tensor whose pieces change places is another one.
        numbers = torch.stack(sums) * _weights(device, len(sums))
        total.index_add_(0, _indices(owners, device), numbers)
    for members in few.values():
        _add_few(total, members, weights, spare)
    return total


def _pieces(words: Tensor, length: int) -> Iterator[Tensor]:
    """Yield the words of a tensor, so many at once."""
    for piece in torch.split(words, length * 8 // words.element_size()):
        yield _aligned(piece)


def _aligned(words: Tensor) -> Tensor:
    return words if words.dtype is torch.int64 else words.clone().view(torch.int64)


def _weighted_sum(words: Tensor, weights: Tensor, spare: Tensor) -> Tensor:
    mixed = _mix(words, out=spare)
    if mixed.device.type == "cpu":
        return torch.dot(mixed, weights)
    return mixed.mul_(weights).sum()


def _add_few(
    total: Tensor, members: Sequence[tuple[int, Tensor, int]], weights: Tensor, spare: Tensor
) -> None:
    """Add the sums of small tensors of one dtype, many at once."""
    # What fills no word must not count as a first word does.
    factor = 1 if members[0][1].dtype is torch.int64 else _MULTIPLIERS[0]
    first, most = 0, weights.numel() // 2
    while first < len(members):
        last, length = first, 0
        ends: list[int] = [0]
        while last < len(members) and length + members[last][2] <= most:
            length += members[last][2]
            ends.append(length)
            last += 1
        joined = torch.cat([bits for _, bits, _ in members[first:last]]).long()
        running = torch.zeros(length + 1, dtype=torch.int64, device=total.device)
        torch.cumsum(_mix(joined, out=spare[:length]).mul_(weights[:length]), 0, out=running[1:])
        owners = _indices([owner for owner, _, _ in members[first:last]], total.device)
        total.index_add_(0, owners, running[_indices(ends, total.device)].diff() * factor)
        first = last


def _indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    # From pinned memory a GPU fetches them by itself; for others the host would wait until it has done all before.
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _mix(words: Tensor, out: Tensor | None = None) -> Tensor:
    """Let the highest bits, which a multiplication leaves where they are, reach lower ones."""
    return torch.bitwise_right_shift(words, 33, out=out).bitwise_xor_(words)


def _bits(tensor: Tensor) -> _Bits:
    with torch.no_grad():
        flat = tensor.detach().resolve_conj().resolve_neg()
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        if not flat.is_contiguous():  # such as channels_last
            flat = flat.permute(sorted(range(flat.dim()), key=flat.stride().__getitem__, reverse=True))
        flat = flat.contiguous().view(-1)
        flat = flat.view(_INTEGERS[flat.element_size()])
    in_word = 8 // flat.element_size()
    count = flat.numel()
    whole = count - count % in_word
    words = flat[:whole]
    # A gradient in a bucket, or a tensor in a mapped file, may begin in the middle of a word.
    if not (words.storage_offset() % in_word or words.data_ptr() % 8):
        words = words.view(torch.int64)
    return _Bits(tensor, tensor.data_ptr(), words, flat[whole:], (whole // in_word, count - whole))


_NOTHING = _bits(torch.empty(0))


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device, count: int | None = None) -> Tensor:
    """Return odd numbers, one for each position, that look random and are the same on every rank."""
    if count is None:
        count = _WORDS if device.type == "cpu" else _WORDS_OF_GPU
    number = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MULTIPLIERS[0]
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
        number = (number ^ (number >> shift)) * multiplier
    return number | 1
