"""Exact checksums of tensors: a 64-bit number for each, of its bits and their positions, computed on its device."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Words of 64 bits that are taken at once: with the weights and a copy of them they stay in the cache of a core, and are
# all the memory that a check needs. A GPU would mostly wait for the next call.
_WORDS, _WORDS_OF_GPU = 2**15, 2**20
# A tensor of fewer elements goes through one buffer with others: a call each would cost more than reading it.
_FEW = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of SplitMix64


class Checksums:
    """Checksums of a list of tensors, on their way from the devices.

    Equal bits give equal numbers, whatever they mean as values: a nan equals itself, and zero differs from minus zero.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._parts: list[tuple[list[int], Tensor]] = []
        self._event: torch.cuda.Event | None = None
        places: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            places.setdefault(tensor.device, []).append(index)
        with torch.no_grad():
            for device, indices in places.items():
                self._start(device, indices, [tensors[index].detach() for index in indices])

    def _start(self, device: torch.device, indices: list[int], tensors: list[Tensor]) -> None:
        if device.type == "cuda":
            sums = _checksums(tensors)
            self._parts.append((indices, torch.empty_like(sums, device="cpu", pin_memory=True)))
            self._parts[-1][1].copy_(sums, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        elif device.type == "cpu":
            self._parts.append((indices, _checksums(tensors)))
        else:  # XLA: integers of 64 bits and views of bits would be one more program to compile
            self._parts.append((indices, torch.cat([_checksums([tensor.cpu()]) for tensor in tensors])))

    def ready(self) -> bool:
        """Return whether :meth:`numbers` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> list[int]:
        """Return them in the order of the tensors."""
        if self._event is not None:
            self._event.synchronize()
        found = [0] * self._count
        for indices, sums in self._parts:
            for index, number in zip(indices, sums.tolist(), strict=True):
                found[index] = number
        return found


def folded(values: Iterable[object]) -> int:
    """Return one number for several numbers or texts; another one if any of them, or their order, is another."""
    text = ",".join(map(str, values))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksums of tensors of one device, on that device."""
    weights = _weights(tensors[0].device)
    spare = torch.empty_like(weights)
    total = torch.zeros(len(tensors), dtype=torch.int64, device=weights.device)
    parts: list[Tensor] = []
    owners: list[int] = []
    few: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for owner, tensor in enumerate(tensors):
        bits = _bits(tensor)
        in_word = 8 // bits.element_size()
        count = bits.numel()
        whole = 0 if count < _FEW else count - count % in_word
        if whole < count:
            few.setdefault(bits.dtype, []).append((owner, bits[whole:]))
        for start in range(0, whole, len(weights) * in_word):
            piece = bits[start : min(start + len(weights) * in_word, whole)]
            parts.append(_sum_of_words(piece, weights, spare))
            owners.append(owner)
    if parts:
        # By the position of a piece among all: a tensor whose pieces change places is another one.
        sums = torch.stack(parts) * _weights(weights.device, len(parts))
        total.index_add_(0, torch.tensor(owners, device=total.device), sums)
    for members in few.values():
        _add_few(total, members, weights)
    return total


def _sum_of_words(piece: Tensor, weights: Tensor, spare: Tensor) -> Tensor:
    """Return the weighted sum of the bits of a part of a tensor, in words of 64 bits."""
    in_word = 8 // piece.element_size()
    if piece.storage_offset() % in_word or piece.data_ptr() % 8:  # such as a gradient in a bucket
        piece = piece.clone(memory_format=torch.contiguous_format)
    words = piece.view(torch.int64)
    mixed = spare[: len(words)]
    _mix(words, out=mixed)
    if mixed.device.type == "cpu":
        return torch.dot(mixed, weights[: len(words)])
    return mixed.mul_(weights[: len(words)]).sum()


def _add_few(total: Tensor, members: Sequence[tuple[int, Tensor]], weights: Tensor) -> None:
    """Add the sums of small tensors of one dtype, as many at once as the weights reach for."""
    first = 0
    while first < len(members):
        last, length = first, 0
        ends: list[int] = []
        while last < len(members) and length + len(members[last][1]) <= len(weights):
            length += len(members[last][1])
            ends.append(length)
            last += 1
        joined = torch.cat([bits for _, bits in members[first:last]]).long()
        running = (_mix(joined) * weights[:length]).cumsum(0)
        upto = torch.nn.functional.pad(running, (1, 0))[torch.tensor([0, *ends], device=total.device)]
        owners = torch.tensor([owner for owner, _ in members[first:last]], device=total.device)
        total.index_add_(0, owners, upto.diff())
        first = last


def _mix(words: Tensor, out: Tensor | None = None) -> Tensor:
    """Let the highest bits, which a multiplication leaves where they are, reach lower ones."""
    return torch.bitwise_right_shift(words, 33, out=out).bitwise_xor_(words)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers of its size, in the order in which they lie in memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_contiguous():  # such as channels_last
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device, count: int | None = None) -> Tensor:
    """Return odd numbers, one for each position, that look random and are the same on every rank."""
    if count is None:
        count = _WORDS if device.type == "cpu" else _WORDS_OF_GPU
    number = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MULTIPLIERS[0]
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
        number = (number ^ (number >> shift)) * multiplier
    return number | 1
