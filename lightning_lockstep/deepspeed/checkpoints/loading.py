"""Whole weights on their way into a model, which may be divided among the ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_lockstep._doors.deepspeed_internals import divides_parameters, refresh_copies
from lightning_lockstep._doors.torch_internals import load_own_values
from lightning_lockstep.deepspeed.agreement import agreed
from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidated
from lightning_lockstep.distributed import Communicator

__all__ = ["check_names", "load_by_module", "load_plain_weights", "whole_checkpoint"]


def whole_checkpoint(
    folder: str | Path,
    module: nn.Module,
    communicator: Communicator,
    *,
    divided: bool,  # stage 3: rank 0's values go to all, the others get the names alone
) -> dict[str, Any]:
    """Return a checkpoint folder with whole weights, for any number of ranks; on all ranks together."""
    reads = communicator.is_main or not divided
    found = agreed(communicator, lambda: consolidated(folder) if reads else {})
    if not divided:
        return found
    weights = found.pop("state_dict", {})
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: None if name in parameters else value for name, value in weights.items()}
    others, shared = communicator.broadcast((found, buffers))
    return {**others, "state_dict": weights or shared}


def load_plain_weights(
    engine: Any,
    module: nn.Module,
    state: Mapping[str, Tensor],  # whole tensors; in stage 3 those of rank 0 count
    *,
    strict: bool = True,
) -> None:
    """Load whole weights into an engine's module, and into the float32 copies of its optimizer."""
    if divides_parameters(engine):
        check_names(module, state, strict)
        load_by_module(module, state, divided=True)
    else:
        module.load_state_dict(state, strict=strict)
    refresh_copies(engine.optimizer)


def load_by_module(
    module: nn.Module,
    state: Mapping[str, Any],  # None: this rank has no values of it
    *,
    divided: bool,  # those of rank 0 go to all ranks, which call this together
) -> None:
    """Load whole weights one module at a time; only the values of that one are asked for."""
    prefixes = {f"{name}." if name else "": one for name, one in module.named_modules(remove_duplicate=False)}
    names: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for name in state:
        names[_prefix_of(name, prefixes)].append(name)
    for prefix, one in prefixes.items():
        with _whole(list(one.parameters(recurse=False)), divided):
            known = {name: state[name] for name in names[prefix]}
            _load_one(one, prefix, {name: value for name, value in known.items() if value is not None})


def check_names(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Raise if a module and some weights have different names."""
    names = set(module.state_dict())
    missing, unexpected = sorted(names - set(state)), sorted(set(state) - names)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: missing {missing}, unexpected {unexpected}"
        )


def _whole(parameters: list[nn.Parameter], divided: bool) -> AbstractContextManager[object]:
    if not divided:
        return nullcontext()
    import deepspeed

    whole: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
    return whole


def _prefix_of(name: str, prefixes: Collection[str]) -> str:
    """Return the prefix of the innermost module that a name can belong to."""
    while name not in prefixes:
        name = name.rstrip(".").rpartition(".")[0]
        name = f"{name}." if name else ""
    return name


def _load_one(module: nn.Module, prefix: str, state: dict[str, Any]) -> None:
    errors: list[str] = []
    load_own_values(module, prefix, state, errors)
    if errors:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join(errors)
        )
