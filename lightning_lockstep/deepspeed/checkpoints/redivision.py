"""The state of a fit, divided among the ranks of the run that resumes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
    if engine.zero_nvme_offload_optimizer():
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
    if getattr(engine.optimizer, "round_robin_gradients", False):
        _link_in_round_robin(engine.optimizer)
    _make_room(engine, state)
    write = _write_divided if engine.zero_optimization_partition_weights() else _write_flat
    for parameter, name in _trained(engine).items():
        write(parameter, None, state.masters[name], rank)
        for key, moments in state.moments.items():
            write(parameter, key, moments[name], rank)
    optimizer = engine.optimizer
    optimizer.overflow = state.flags["overflow"]
    scaler = getattr(optimizer, "loss_scaler", None)
    for name, value in state.flags["loss_scaler"].items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def _groups(engine: Any) -> list[list[Any]]:
    """Return the parameters of each group of the engine's optimizer."""
    optimizer = engine.optimizer
    if not engine.zero_optimization_partition_weights():
        return list(getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups)
    found: list[list[Any]] = [[] for _ in optimizer.optimizer.param_groups]
    for number, parameters in enumerate(optimizer.fp16_groups):
        found[optimizer.sub_group_to_group_id[number]] += parameters
    return found


def _trained(engine: Any) -> dict[Any, str]:
    """Return the names of the parameters that the engine's optimizer has."""
    return {parameter: engine.param_names[parameter] for group in _groups(engine) for parameter in group}


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
    torch_optimizer = engine.optimizer.optimizer
    kind = type(torch_optimizer).__name__
    groups = torch_optimizer.param_groups
    if len(groups) != len(state.options):
        raise ConfigurationError(
            f"{folder}: its optimizer has {len(state.options)} groups of parameters, and this run's {kind}"
            f" {len(groups)}: expected the same number."
        )
    names_here = [{engine.param_names[parameter] for parameter in group} for group in _groups(engine)]
    for number, (saved_names, names) in enumerate(zip(state.names, names_here, strict=True)):
        if set(saved_names) != names:
            raise ConfigurationError(
                f"{folder}: its optimizer has {_named(set(saved_names) ^ names)} in other groups than this run's"
                f" {kind} (group {number}): expected the same parameters in each group."
            )
    known = set(torch_optimizer.defaults)
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
    torch_optimizer = engine.optimizer.optimizer
    with _vectors_in_groups(engine) as groups:
        entries: dict[int, dict[str, Any]] = {}
        options = []
        for vectors, shared, saved in zip(groups, state.shared, state.options, strict=True):
            ids = range(len(entries), len(entries) + len(vectors))
            options.append({**saved, "params": list(ids)})
            for number, vector in zip(ids, vectors, strict=True):
                entries[number] = {key: _copy(value) for key, value in shared.items()}
                entries[number] |= {key: torch.zeros_like(vector) for key in state.moments}
        torch_optimizer.load_state_dict(
            {"state": {number: entry for number, entry in entries.items() if entry}, "param_groups": options}
        )
        if not engine.zero_optimization_partition_weights():
            _link(engine, groups)


@contextmanager
def _vectors_in_groups(engine: Any) -> Iterator[list[list[Tensor]]]:
    """Give the vectors of each group, which torch's optimizer has for parameters; in stage 3 only inside the body."""
    optimizer = engine.optimizer
    groups = optimizer.optimizer.param_groups
    if not engine.zero_optimization_partition_weights():
        yield [list(group["params"]) for group in groups]
        return
    for number, vector in enumerate(optimizer.fp32_partitioned_groups_flat):
        groups[optimizer.sub_group_to_group_id[number]]["params"].append(vector)
    try:
        yield [list(group["params"]) for group in groups]
    finally:
        for group in optimizer.optimizer.param_groups:
            group["params"] = []


def _link_in_round_robin(optimizer: Any) -> None:
    """Let each parameter of stage 1 or 2 know where its part is, whose vector has another order than its group.

    DeepSpeed 0.19.8 links them with the places that the vector really has only where it is padded.
    """
    padded = [[1]] * len(optimizer.bit16_groups)
    with replaced(optimizer, round_robin_bit16_padding=padded):
        optimizer._link_all_hp_params()


def _link(engine: Any, groups: Sequence[Sequence[Tensor]]) -> None:
    """Let each parameter of stage 1 or 2 find its state, as DeepSpeed does after a first step."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    state: Mapping[Tensor, Any] = engine.optimizer.optimizer.state
    for parameters, (vector,) in zip(_groups(engine), groups, strict=True):
        lazy_init_hp_params_optimizer_state(parameters, vector, state)


def _write_flat(parameter: Any, key: str | None, values: Values, rank: int) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if parameter._hp_mapping is None:
        return  # no part of it is on this rank
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
