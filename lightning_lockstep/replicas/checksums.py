"""Exact checksums of tensors: a 64-bit number for each, of its bits and their positions, computed on its device."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

# So many words of 64 bits are taken at once: with the weights and a copy of them they stay in the cache of a core, and
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
        flat = flat.permute(
            sorted(range(flat.dim()), key=flat.stride().__getitem__, reverse=True)
        ).contiguous()
    flat = flat.view(-1).view(_INTEGERS[flat.element_size()])
    in_word = 8 // flat.element_size()
    whole = len(flat) - len(flat) % in_word
    words = flat[:whole]
    # A gradient in a bucket, or a tensor in a mapped file, may begin in the middle of a word.
    if not (words.storage_offset() % in_word or words.data_ptr() % 8):
        words = words.view(torch.int64)
    return words, flat[whole:]


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers, one for each position, that look random and are the same on every rank."""
    count = _WORDS if device.type == "cpu" else _WORDS_OF_GPU
    number = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MULTIPLIERS[0]
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
        number = (number ^ (number >> shift)) * multiplier
    return number | 1
