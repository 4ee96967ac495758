"""Where the values of each parameter are, in the files of a checkpoint.

- Stage 0: whole, with the model; float32 copies of half-precision ones, in the same file, have no names.
- Stages 1 and 2: whole, with the model. The float32 copies of each parameter group are one flat vector, of which every
  rank has a part; the parts of all ranks, one after the other, are the vector.
- Stage 3: every rank has a part of each parameter, and its parts of all parameters, one after the other, are its
  vectors. Frozen parameters are with the model states, in parts too.

What an optimizer keeps for each value, such as Adam's moments, lies as the float32 copies do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lockstep._doors.torch_internals import storage_identity
from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint
from lightning_lockstep.deepspeed.checkpoints.unnamed_copies import unnamed_copies
from lightning_lockstep.deepspeed.checkpoints.values import Values, count, cut, flat
from lightning_lockstep.errors import ConfigurationError

__all__ = ["Dtype", "divided_values", "find_values", "flat_values"]

Dtype = Literal["float32", "as_saved"]

_HALF = (torch.float16, torch.bfloat16)


def find_values(checkpoint: Checkpoint, dtype: Dtype) -> tuple[dict[str, Values], dict[str, str]]:
    """Return where the values of each tensor are, and which names share those of another."""
    first = checkpoint.model_states[0]
    saved = {name: value for name, value in first["module"].items() if isinstance(value, Tensor)}
    states = [states["optimizer_state_dict"] for states in checkpoint.optimizer_states]
    is_divided = bool(states) and "fp32_flat_groups" in states[0]
    masters = _masters(checkpoint, states, saved)
    frozen = _frozen(checkpoint) if is_divided else {}
    values = {}
    for name, tensor in saved.items():
        is_whole = not is_divided or tensor.numel() > 0 or name in first["buffer_names"]
        if name in masters and (dtype == "float32" or is_divided):
            values[name] = masters[name].of(torch.float32 if dtype == "float32" else tensor.dtype)
        elif name in frozen:
            values[name] = frozen[name].of(_written(frozen[name].parts[0].dtype, dtype))
        elif is_whole:
            values[name] = Values(tensor.shape, _written(tensor.dtype, dtype), [flat(tensor)])
    aliases = _aliases(first, saved, values, masters)
    lost = [name for name in saved if name not in values and name not in aliases]
    if lost and first["frozen_param_shapes"] is not None:
        raise ConfigurationError(
            f"{checkpoint.folder}: holds no values of {', '.join(lost)}. In stage 3 DeepSpeed saves only parameters"
            " that the optimizer has, and frozen ones."
        )
    return values, aliases


def _written(saved: torch.dtype, dtype: Dtype) -> torch.dtype:
    return torch.float32 if dtype == "float32" and saved in _HALF else saved


def _aliases(
    model_states: Mapping[str, Any],
    saved: Mapping[str, Tensor],
    values: Mapping[str, Values],
    masters: Mapping[str, Values],
) -> dict[str, str]:
    """Return for each name that shares the values of another one that other name."""
    aliases = {
        name: source
        for name, source in (model_states.get("shared_params") or {}).items()
        if name in saved and source in values and saved[source].shape == saved[name].shape
    }
    # Stage 0 has no list of them, and those of the other stages lack modules and parameters that their parent has
    # twice. What was one tensor when it was saved is one again in a mapped file, also the empty one of stage 3.
    same: dict[object, list[str]] = {}
    for name, tensor in saved.items():
        place = (storage_identity(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        same.setdefault(place, []).append(name)
    for names in same.values():
        known = [name for name in names if name in values and name not in aliases]
        if len(known) == 1 or (known and saved[known[0]].numel() > 0):
            source = next((name for name in known if name in masters), known[0])
            aliases.update({name: source for name in names if name != source and name not in aliases})
    return aliases


def _masters(
    checkpoint: Checkpoint, states: Sequence[Mapping[str, Any]], saved: Mapping[str, Tensor]
) -> dict[str, Values]:
    """Return the float32 copies that the optimizer works on, by the names of their parameters."""
    first = checkpoint.model_states[0]
    if not states:
        return unnamed_copies(first, saved)
    if "fp32_flat_groups" in states[0]:
        vectors = [state["fp32_flat_groups"] for state in states]
        return divided_values(checkpoint, vectors)
    return flat_values(checkpoint, [state["single_partition_of_fp32_groups"] for state in states])


def flat_values(
    checkpoint: Checkpoint,
    vectors: Sequence[Sequence[Tensor]],  # each rank's part, a vector for each group of parameters
) -> dict[str, Values]:
    """Cut flat vectors of stages 1 and 2 into the values of each parameter."""
    found = {}
    groups = checkpoint.model_states[0]["param_shapes"]
    first = checkpoint.optimizer_states[0]["optimizer_state_dict"]
    gaps = first.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    for number, group in enumerate(groups):
        parts = [flat(of_rank[number]) for of_rank in vectors]
        held, needed = count(parts), sum(map(math.prod, group.values())) + sum(gaps[number])
        # The vector is padded so that each rank's part has the same even length; not every optimizer saves that.
        if not needed <= held < needed + 2 * len(vectors):
            raise _mismatch(checkpoint.folder, f"parameter group {number}", held, needed)
        start = 0
        for (name, shape), gap in zip(group.items(), gaps[number], strict=True):
            found[name] = Values(shape, parts[0].dtype, cut(parts, start, math.prod(shape)))
            start += math.prod(shape) + gap
    return found


def divided_values(
    checkpoint: Checkpoint,
    vectors: Sequence[Sequence[Tensor]],  # of each rank, those that follow each other
) -> dict[str, Values]:
    """Cut vectors of stage 3, which hold a part of each parameter, into the values of each."""
    of_ranks = [[flat(vector) for vector in of_rank] for of_rank in vectors]
    groups = checkpoint.model_states[0]["param_shapes"]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    lengths = {name: -(-math.prod(shape) // len(vectors)) for name, shape in shapes.items()}
    for rank, of_rank in enumerate(of_ranks):
        if count(of_rank) != sum(lengths.values()):
            raise _mismatch(checkpoint.folder, f"rank {rank}", count(of_rank), sum(lengths.values()))
    found, start = {}, 0
    for name, shape in shapes.items():
        parts = [part for of_rank in of_ranks for part in cut(of_rank, start, lengths[name])]
        found[name] = Values(shape, of_ranks[0][0].dtype, cut(parts, 0, math.prod(shape)))
        start += lengths[name]
    return found


def _frozen(checkpoint: Checkpoint) -> dict[str, Values]:
    """Return where the values of frozen parameters are in stage 3, of which each rank has a part."""
    shapes = checkpoint.model_states[0]["frozen_param_shapes"] or {}
    frozen = {}
    for name, shape in shapes.items():
        parts = [flat(states["frozen_param_fragments"][name]) for states in checkpoint.model_states]
        if count(parts) < math.prod(shape):
            raise _mismatch(checkpoint.folder, name, count(parts), math.prod(shape))
        frozen[name] = Values(shape, parts[0].dtype, cut(parts, 0, math.prod(shape)) or parts[:1])
    return frozen


def _mismatch(folder: Path, where: str, held: int, needed: int) -> ConfigurationError:
    return ConfigurationError(
        f"{folder}: the optimizer states hold {held} values of {where}, expected {needed}. Either the files are of"
        " different runs, or the optimizer's states were moved to NVMe, which is not supported."
    )
