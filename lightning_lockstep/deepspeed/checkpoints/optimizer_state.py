"""The state of the optimizer in a checkpoint of ZeRO, put together for each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint
from lightning_lockstep.deepspeed.checkpoints.partitions import divided_values, flat_values
from lightning_lockstep.deepspeed.checkpoints.plain_data import Inert, is_plain
from lightning_lockstep.deepspeed.checkpoints.values import Values
from lightning_lockstep.errors import ConfigurationError

__all__ = ["OptimizerState", "read_optimizer_state"]


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizers of all ranks keep, each value once."""

    masters: Mapping[str, Values]  # float32 weights, by the names of the parameters
    # One for each value, such as exp_avg: by its key, by the names of the parameters.
    moments: Mapping[str, Mapping[str, Values]]
    shared: Sequence[Mapping[str, Any]]  # kept once, such as step: of each group of parameters, by its key
    options: Sequence[Mapping[str, Any]]  # of each group, such as lr
    names: Sequence[Sequence[str]]  # of the parameters of each group
    flags: Mapping[str, Any]  # of DeepSpeed's own optimizer: overflow, attributes of its loss scaler

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that are trained, by their names."""
        return {name: tuple(values.shape) for name, values in self.masters.items()}


def read_optimizer_state(checkpoint: Checkpoint) -> OptimizerState:
    """Return the state of the optimizer that a checkpoint of stage 1, 2 or 3 holds; nothing is copied."""
    if not checkpoint.optimizer_states:
        raise ConfigurationError(
            f"{checkpoint.folder}: was written in stage 0, where the state of the optimizer is not divided: expected"
            " one of stage 1, 2 or 3. Resume it in stage 0, or go on with its weights alone, as"
            " `lockstep-consolidate` writes them."
        )
    states = [one["optimizer_state_dict"] for one in checkpoint.optimizer_states]
    is_divided = "fp32_flat_groups" in states[0]
    key = "fp32_flat_groups" if is_divided else "single_partition_of_fp32_groups"
    vectors = [state[key] for state in states]
    put_together = divided_values if is_divided else flat_values
    torch_states = [_of_torch(state) for state in states]
    entries, options = torch_states[0]
    kinds = _kinds(checkpoint, entries, vectors[0], _paddings(states[0], len(vectors[0])))
    moments = {
        name: put_together(checkpoint, [[entry[name] for entry in of_rank] for of_rank, _ in torch_states])
        for name, is_moment in kinds.items()
        if is_moment
    }
    groups = [group["params"] for group in options]
    shapes = checkpoint.model_states[0]["param_shapes"]
    return OptimizerState(
        masters=put_together(checkpoint, vectors),
        moments=moments,
        shared=[
            {name: entries[ids[0]][name] for name in kinds if ids and not kinds[name] and entries[ids[0]]}
            for ids in groups
        ],
        options=[{name: value for name, value in group.items() if name != "params"} for group in options],
        names=[[name for number in ids for name in shapes[number]] for ids in groups],
        flags=_flags(states[0]),
    )


def _of_torch(state: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
    """Return what torch's optimizer keeps for each of its vectors, and its groups, in which vectors are numbers."""
    inner = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    if not isinstance(inner, Mapping):
        raise ConfigurationError(
            "The checkpoint was written with zero_optimization.elastic_checkpoint, whose files do not say the options"
            " of the optimizer: expected one without."
        )
    total = sum(len(group["params"]) for group in inner["param_groups"])
    return [inner["state"].get(number, {}) for number in range(total)], inner["param_groups"]


def _paddings(state: Mapping[str, Any], total: int) -> Sequence[int]:
    """Return how many values follow those of the parameters in each vector; the float32 copies are saved without."""
    return state.get("group_paddings") or [0] * total


def _kinds(
    checkpoint: Checkpoint,
    entries: Sequence[Mapping[str, Any]],
    vectors: Sequence[Tensor],
    paddings: Sequence[int],
) -> dict[str, bool]:
    """Return whether what an optimizer keeps is one number for each value, or else one for all of them."""
    kinds: dict[str, bool] = {}
    for entry, vector, padding in zip(entries, vectors, paddings, strict=True):
        lengths = (vector.numel(), vector.numel() + padding)
        for name, value in entry.items():
            is_moment = isinstance(value, Tensor) and value.dim() > 0 and value.numel() in lengths
            is_shared = is_plain(value) and (not isinstance(value, Tensor) or value.numel() == 1)
            if not (is_moment or is_shared) or kinds.setdefault(name, is_moment) != is_moment:
                size = math.prod(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigurationError(
                    f"{checkpoint.folder}: its optimizer keeps {name!r} ({size}), which is neither one number nor one"
                    " for each weight: only the ranks that wrote it can go on with it. Resume on as many, or go on with"
                    " the weights alone, as `lockstep-consolidate` writes them."
                )
    if any(bool(entry) != bool(entries[0]) for entry in entries):
        raise ConfigurationError(
            f"{checkpoint.folder}: its optimizer has made steps with some of its groups and none with others: resume"
            " on as many ranks as have written it."
        )
    return kinds


def _flags(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of DeepSpeed's optimizer that change during training."""
    scaler = state.get("loss_scaler")
    kept = scaler.state if isinstance(scaler, Inert) and isinstance(scaler.state, Mapping) else {}
    scaler_state = {name: value for name, value in kept.items() if is_plain(value)}
    return {"overflow": bool(state.get("overflow", False)), "loss_scaler": scaler_state}
