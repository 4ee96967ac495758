"""The state of the optimizer, divided among another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._doors.deepspeed_internals import (
    divides_parameters,
    has_part_here,
    keeps_state_on_nvme,
    link_parts,
    link_state,
    loss_scaler,
    padded,
    parameter_groups,
    parameter_names,
    reorders_gradients,
    set_overflow,
    torch_optimizer,
    vectors_of_groups,
)
from lightning_lockstep._text import listed
from lightning_lockstep.deepspeed.checkpoints.consolidation import Values, cut, divided_values, flat_values
from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint, Inert, in_memory, is_plain
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced

# -- The state of the optimizer in a checkpoint of ZeRO, put together for each parameter --


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


# -- The state of a fit, divided among the ranks of the run that resumes it --

_MOST_NAMED = 5  # parameters in one message


def check_same_training(engine: Any, state: OptimizerState, folder: object) -> None:
    """Raise if a checkpoint is of another model or of another optimizer than an engine has."""
    if keeps_state_on_nvme(engine):
        raise ConfigurationError(
            f"{folder}: was written by another number of ranks or in another stage, and this run keeps the state of the"
            " optimizer on NVMe, where it cannot be redivided. Resume with offload_optimizer='cpu' or 'none'."
        )
    _check_parameters(engine, state, folder)
    _check_groups(engine, state, folder)


def redivide(engine: Any, state: OptimizerState, rank: int) -> None:
    """Write this rank's part of the state of an optimizer into an engine."""
    # One parameter is in memory at a time; what is in files stays there.
    if reorders_gradients(engine.optimizer):
        _link_in_round_robin(engine.optimizer)
    _make_room(engine, state)
    write = _write_divided if divides_parameters(engine) else _write_flat
    for parameter, name in _trained(engine).items():
        write(parameter, None, state.masters[name], rank)
        for key, moments in state.moments.items():
            write(parameter, key, moments[name], rank)
    set_overflow(engine.optimizer, state.flags["overflow"])
    scaler = loss_scaler(engine.optimizer)
    for name, value in state.flags["loss_scaler"].items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def _trained(engine: Any) -> dict[Any, str]:
    """Return the names of the parameters that the engine's optimizer has."""
    names = parameter_names(engine)
    return {parameter: names[parameter] for group in parameter_groups(engine) for parameter in group}


def _check_parameters(engine: Any, state: OptimizerState, folder: object) -> None:
    here = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for parameter, name in _trained(engine).items()
    }
    faults = []
    for what, names in (
        ("has no state of", here.keys() - state.shapes.keys()),
        ("has also that of", state.shapes.keys() - here.keys()),
    ):
        if names:
            faults.append(f"{what} {_named(names)}")
    faults += [
        f"has {name} of shape {state.shapes[name]}, the model one of {here[name]}"
        for name in sorted(here.keys() & state.shapes.keys())
        if here[name] != state.shapes[name]
    ]
    if faults:
        raise ConfigurationError(
            f"{folder}: is of another model: it {'; it '.join(faults[:_MOST_NAMED])}. Expected the model that it was"
            " written with, with the same parameters trained."
        )


def _check_groups(engine: Any, state: OptimizerState, folder: object) -> None:
    optimizer, known_names = torch_optimizer(engine), parameter_names(engine)
    kind = type(optimizer).__name__
    groups = optimizer.param_groups
    if len(groups) != len(state.options):
        raise ConfigurationError(
            f"{folder}: its optimizer has {len(state.options)} groups of parameters, and this run's {kind}"
            f" {len(groups)}: expected the same number."
        )
    names_here = [{known_names[parameter] for parameter in group} for group in parameter_groups(engine)]
    for number, (saved_names, names) in enumerate(zip(state.names, names_here, strict=True)):
        if set(saved_names) != names:
            raise ConfigurationError(
                f"{folder}: its optimizer has {_named(set(saved_names) ^ names)} in other groups than this run's"
                f" {kind} (group {number}): expected the same parameters in each group."
            )
    known = set(optimizer.defaults)
    for saved, group in zip(state.options, groups, strict=True):
        missing, unknown = known - set(saved), set(saved) - set(group) - {"step"}
        # An older release of the same optimizer lacks options, and a scheduler leaves some behind.
        if missing and unknown:
            raise ConfigurationError(
                f"{folder}: was written with another optimizer than this run's {kind}: its options are"
                f" {_named(unknown)} and not {_named(missing)}. Expected the same optimizer, or a plain checkpoint of"
                " the weights alone, as `lockstep-consolidate` writes it."
            )


def _named(names: Any) -> str:
    return listed(sorted(names), _MOST_NAMED)


def _make_room(engine: Any, state: OptimizerState) -> None:
    """Load options and shared values as torch's optimizer does, and empty vectors for the rest."""
    optimizer = torch_optimizer(engine)
    with _vectors_in_groups(engine) as groups:
        entries: dict[int, dict[str, Any]] = {}
        options = []
        for vectors, shared, saved in zip(groups, state.shared, state.options, strict=True):
            ids = range(len(entries), len(entries) + len(vectors))
            options.append({**saved, "params": list(ids)})
            for number, vector in zip(ids, vectors, strict=True):
                entries[number] = {key: _copy(value) for key, value in shared.items()}
                entries[number] |= {key: torch.zeros_like(vector) for key in state.moments}
        optimizer.load_state_dict(
            {"state": {number: entry for number, entry in entries.items() if entry}, "param_groups": options}
        )
        if not divides_parameters(engine):
            _link(engine, groups)


@contextmanager
def _vectors_in_groups(engine: Any) -> Iterator[list[list[Tensor]]]:
    """Give the vectors of each group, which torch's optimizer has for parameters; in stage 3 only inside the body."""
    optimizer = torch_optimizer(engine)
    groups = optimizer.param_groups
    if not divides_parameters(engine):
        yield [list(group["params"]) for group in groups]
        return
    for number, vector in vectors_of_groups(engine.optimizer):
        groups[number]["params"].append(vector)
    try:
        yield [list(group["params"]) for group in groups]
    finally:
        for group in optimizer.param_groups:
            group["params"] = []


def _link_in_round_robin(optimizer: Any) -> None:
    """Let each parameter of stage 1 or 2 know where its part is, whose vector has another order than its group.

    DeepSpeed 0.19.8 links them with the places that the vector really has only where it is padded.
    """
    with replaced(optimizer, **padded(optimizer)):
        link_parts(optimizer)


def _link(engine: Any, groups: Sequence[Sequence[Tensor]]) -> None:
    """Let each parameter of stage 1 or 2 find its state, as DeepSpeed does after a first step."""
    state: Mapping[Tensor, Any] = torch_optimizer(engine).state
    for parameters, (vector,) in zip(parameter_groups(engine), groups, strict=True):
        link_state(parameters, vector, state)


def _write_flat(parameter: Any, key: str | None, values: Values, rank: int) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if not has_part_here(parameter):
        return
    whole = values.copy_to(in_memory)
    if key is None:
        safe_set_full_fp32_param(parameter, whole)
    else:
        safe_set_full_optimizer_state(parameter, whole, key)


def _write_divided(parameter: Any, key: str | None, values: Values, rank: int) -> None:
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    length = parameter.ds_tensor.numel()
    part = torch.zeros(length, dtype=values.dtype)
    found = cut(values.parts, rank * length, length)
    if found:
        held = torch.cat(found)
        part[: held.numel()] = held
    if key is None:
        safe_set_local_fp32_param(parameter, part)
    else:
        safe_set_local_optimizer_state(parameter, part, key)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
