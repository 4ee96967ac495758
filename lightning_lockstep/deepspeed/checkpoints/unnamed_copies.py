"""Whose the float32 copies of stage 0 are, which DeepSpeed saves without names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep.deepspeed.checkpoints.values import Values, count, cut, flat

__all__ = ["unnamed_copies"]

_HALF = (torch.float16, torch.bfloat16)
_MOST_TRIALS = 100_000  # in finding names; a model has some thousand parameters


def unnamed_copies(model_states: Mapping[str, Any], saved: Mapping[str, Tensor]) -> dict[str, Values]:
    """Return the float32 copies of stage 0 by the names of their parameters, where they can be found out."""
    optimizer = model_states.get("optimizer")
    groups = (optimizer.get("fp32_groups_flat") or optimizer.get("fp32_groups")) if optimizer else None
    buffers = set(model_states["buffer_names"])
    left = {n: t for n, t in saved.items() if t.dtype in _HALF and t.numel() and n not in buffers}
    masters: dict[str, Values] = {}
    for group in groups or ():
        parts = [flat(group)] if isinstance(group, Tensor) else [flat(tensor) for tensor in group]
        found = _in_order(parts, left)
        masters.update(found)
        left = {name: tensor for name, tensor in left.items() if name not in found}
    return masters


def _in_order(parts: Sequence[Tensor], saved: Mapping[str, Tensor]) -> dict[str, Values]:
    """Return whose values the parts are, or nothing if that cannot be found out.

    They are those of some of the tensors, in order, and each is what was saved once it is rounded as that was. Small
    tensors may fit by chance: where it goes on with none, another one than the last one is tried.
    """
    names, total = list(saved), count(parts)
    chosen: list[tuple[int, int]] = []
    begin = start = 0
    for _ in range(_MOST_TRIALS):
        if start == total:
            return {names[i]: _copies(parts, at, saved[names[i]]) for i, at in chosen}
        index = next((i for i in range(begin, len(names)) if _fits(parts, start, saved[names[i]])), None)
        if index is not None:
            chosen.append((index, start))
            begin, start = index + 1, start + saved[names[index]].numel()
        elif chosen:
            begin, start = chosen.pop()
            begin += 1
        else:
            break
    return {}


def _fits(parts: Sequence[Tensor], start: int, tensor: Tensor) -> bool:
    for length in (min(16, tensor.numel()), tensor.numel()):  # most do not even begin alike
        found = cut(parts, start, length)
        if count(found) < length or not torch.equal(torch.cat(found).to(tensor.dtype), flat(tensor)[:length]):
            return False
    return True


def _copies(parts: Sequence[Tensor], start: int, tensor: Tensor) -> Values:
    return Values(tensor.shape, torch.float32, cut(parts, start, tensor.numel()))
