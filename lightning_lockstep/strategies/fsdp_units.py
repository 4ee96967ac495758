"""Which modules are units, each gathered by itself; what cannot be divided, or used with a divided model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_lockstep._lightning import (
    Checkpoint,
    LightningModule,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning_lockstep._registry import public
from lightning_lockstep._settings import Faults
from lightning_lockstep.distributed.sharded_state import is_divided
from lightning_lockstep.distributed.sharding import divided_parts
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.precision import runs_in_fp32

#: Number of values from which ``shard="auto"`` takes a repeated block for a unit; less is not worth a message.
LEAST_UNIT = 100_000
# Their kernels take no weights of 16 bits together with statistics of 32.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def units_of(
    module: LightningModule, rule: Any, *, callbacks: Iterable[Any] | None = None, halves: bool = False
) -> tuple[list[nn.Module], set[nn.Module]]:
    """Return the units, inner ones first, and of them those that compute in float32; raise if there cannot be any."""
    # `callbacks`: those of the Trainer; None before its run, in which configure_model may still make layers.
    # `halves`: whether units compute in 16 bits.
    if divided_parts(module):
        return [], set()
    units, faults = _units(module, rule), Faults(type(module).__name__)
    _look_at_parameters(module, faults)
    if callbacks is not None and not units and rule != "auto" and not callable(rule):
        classes = sorted({type(one).__name__ for one in module.modules()} - {type(module).__name__})
        expected = f"names of classes among its modules: {', '.join(classes)}"
        faults.check(False, "shard", rule, expected)
    given = [one for one in callbacks or () if isinstance(one, public("FP32Modules"))]
    whole = {part for callback in given for part in callback.chosen(module)}
    whole |= {part for part in module.modules() if runs_in_fp32(part)}
    inside = {part for one in whole for part in one.modules() if part is not one}
    units = [unit for unit in units if unit not in inside]  # those compute like the module around them
    full: set[nn.Module] = set()
    if halves:
        # A module that computes in float32 inside a unit of 16 bits is a unit by itself.
        wide = {one for unit in units for one in unit.modules() if one in whole or isinstance(one, _NORMS)}
        full = {part for part in wide - inside if next(part.parameters(), None) is not None}
        units = [one for one in module.modules() if one in units or one in full][::-1]
    for name, parts in _places(module, units):
        if None in parts:
            faults.add(
                f"{name} belongs to the LightningModule itself, and with manual optimization nothing says when it is"
                " needed: expected it in a submodule that is called, or automatic optimization."
            )
        elif len(parts) > 1:
            kinds = " and ".join(sorted(type(part).__name__ for part in parts))
            faults.add(
                f"{name} is shared by {kinds}, which are separate parts (so is batch normalization in 16 bits):"
                " expected all modules that share a parameter in one part. In `shard` and FP32Modules name a module"
                " that contains all of them, or none of them."
            )
    faults.raise_all()
    return units, full


def _look_at_parameters(module: nn.Module, faults: Faults) -> None:
    hooked = [name for name, parameter in module.named_parameters() if _is_hooked(parameter)]
    if hooked:
        faults.add(_HOOKED.format(", ".join(hooked[:4])))
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and (part.sparse or part.max_norm is not None):
            faults.add(
                f"{name} has sparse={part.sparse} and max_norm={part.max_norm}: expected False and None, because"
                " fully_shard reduces no sparse gradients and loses what a forward writes to parameters."
            )


def _units(module: LightningModule, rule: Any) -> list[nn.Module]:
    if rule == "auto":
        chosen: set[Any] = set(_repeated_blocks(module))
        if module.automatic_optimization:  # the LightningModule then gathers what blocks share
            chosen -= {part for _, parts in _places(module, [*chosen]) if len(parts) > 1 for part in parts}
        return [one for one in module.modules() if one in chosen][::-1]
    names = [rule] if isinstance(rule, str) else rule

    def is_unit(name: str, one: nn.Module) -> bool:
        return bool(rule(name, one)) if callable(rule) else type(one).__name__ in names

    return [one for name, one in module.named_modules() if name and is_unit(name, one)][::-1]


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    kinds = [type(one) for one in children]
    for child in children:
        repeats = isinstance(module, (nn.ModuleList, nn.Sequential)) and kinds.count(type(child)) > 1
        if repeats and sum(p.numel() for p in child.parameters()) >= LEAST_UNIT:
            yield child
        else:
            yield from _repeated_blocks(child)


def roots_of(module: LightningModule) -> list[nn.Module]:
    """Return the outermost modules that are called: the module itself, or its children if its step runs backwards."""
    return [module] if module.automatic_optimization else list(_called(module))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        elif not isinstance(child, (nn.ParameterList, nn.ParameterDict)) and [*child.parameters()]:
            yield child


def _places(module: LightningModule, units: Sequence[nn.Module]) -> list[tuple[str, set[nn.Module | None]]]:
    """Return the name of each parameter and the parts that it would be divided with."""
    parts = {*units, *roots_of(module)}
    part_at: dict[str, nn.Module | None] = {}  # by the path of each module
    found: dict[nn.Parameter, tuple[str, set[nn.Module | None]]] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        part = part_at[path] = one if one in parts else part_at.get(path.rpartition(".")[0])
        for name, parameter in one.named_parameters(recurse=False):
            found.setdefault(parameter, (f"{path}.{name}".lstrip("."), set()))[1].add(part)
    return list(found.values())


# -- What a divided model cannot be used with --

_HOOKED = (
    "Hooks for the gradients of {}: expected none, because they are not called once parameters are divided. Change"
    " gradients in on_after_backward or on_before_optimizer_step, where each rank has its part of them in `.grad`."
)
_OPTIMIZERS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop)


def check_trained(module: LightningModule) -> None:
    """Raise if a run trains a parameter that was not divided."""
    left = [name for name, p in module.named_parameters() if p.requires_grad and not is_divided(p)]
    if left:
        raise ConfigurationError(
            f"{', '.join(left[:4])}: trained, but not divided, so nothing reduces the gradient: expected all layers"
            " made in __init__, setup or configure_model; a configure_model that calls fully_shard does so last for the"
            " module that contains all of them."
        )
    for name, parameter in module.named_parameters():
        if _is_hooked(parameter):
            raise ConfigurationError(_HOOKED.format(name))


def _is_hooked(parameter: Any) -> bool:
    """Return whether a program has put hooks on a parameter, which never run once fully_shard has replaced it."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raise if torch cannot make the steps of an optimizer with divided parameters."""
    for optimizer in optimizers:
        if isinstance(optimizer, _OPTIMIZERS):
            raise ConfigurationError(
                f"{type(optimizer).__name__} needs operations that torch does not have for divided parameters: expected"
                " an optimizer that treats each value by itself, such as AdamW or SGD."
            )


def refuse_callbacks(callbacks: Sequence[Any], *, parts: bool) -> None:
    """Raise if a callback needs the whole model, or would save its parts where ranks cannot write them."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging, ModelPruning)):
            raise ConfigurationError(
                f"{name} needs the whole model, but under LockstepFSDPStrategy a rank has a part of it: expected no"
                " such callback. Use it with strategy='lockstep_ddp'."
            )
        if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
            raise ConfigurationError(
                f"{name} saves after a rank has raised, when the other ranks do not save their parts: expected no such"
                " callback, and save_on_exception=False. Use ModelCheckpoint(every_n_train_steps=...), or StopTogether"
                " for a run that is told to stop."
            )
        if parts and isinstance(callback, (Checkpoint, public("StopTogether"))):
            refuse_address(getattr(callback, "dirpath", None), f"{name} with dirpath=")


def refuse_address(folder: object, what: str = "") -> None:
    """Raise if the parts of a model are to be saved anywhere but on a disk."""
    if "://" in str(folder):
        raise ConfigurationError(
            f"{what}{folder} and state_dict='sharded': expected a folder on a disk, in which each rank writes its"
            " parts. Save to a disk that all nodes share, or with state_dict='full', which writes one file anywhere."
        )
