"""The state of a fit, divided among the ranks of the run that resumes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from lightning_lockstep.deepspeed.checkpoints.optimizer_state import OptimizerState
from lightning_lockstep.deepspeed.checkpoints.plain_file import in_memory
from lightning_lockstep.deepspeed.checkpoints.values import Values, cut
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced

__all__ = ["check_same_training", "redivide"]

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
    """Write this rank's part of the state of an optimizer into an engine.

    One parameter is in memory at a time; what is in files stays there.
    """
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
