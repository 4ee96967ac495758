"""Which modules of a model are units, that are gathered by themselves, and whether the model can be divided so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from lightning_lockstep._doors.lightning import LightningModule
from lightning_lockstep._settings import Faults
from lightning_lockstep.distributed.sharding import divided_parts

#: Number of values from which ``shard="auto"`` takes a repeated block for a unit; less is not worth a message.
LEAST_UNIT = 100_000
_ONLY_PARAMETERS = (nn.ParameterList, nn.ParameterDict)


def units_of(module: LightningModule, rule: Any) -> list[nn.Module]:
    """Return the units of a module, inner ones first, and raise where it cannot be divided."""
    if divided_parts(module):
        return []
    units, roots = _units(module, rule), roots_of(module)
    faults = Faults(type(module).__name__)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            faults.add(
                f"{name} is a scalar, which fully_shard cannot divide: expected a tensor of one element."
            )
    holders = _holders(module, {*units, *roots})
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, parts in holders.items():
        if None in parts:
            faults.add(
                f"{names[parameter]} belongs to the module itself, and with manual optimization nothing says when it"
                " is needed: expected it in a module that is called, or automatic optimization."
            )
        elif len(parts) > 1 and rule == "auto" and module.automatic_optimization:
            units = [unit for unit in units if unit not in parts]
        elif len(parts) > 1:
            kinds = " and ".join(sorted(type(part).__name__ for part in parts if part is not None))
            faults.add(
                f"{names[parameter]} is shared by {kinds}, which are parts by themselves: expected all that share a"
                " parameter in one part. Let `shard` name neither, or a module that has both in it."
            )
    faults.raise_all()
    return units


def _units(module: nn.Module, rule: Any) -> list[nn.Module]:
    if rule == "auto":
        chosen = set(_repeated_blocks(module))
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
    """Return what is called from outside: the module, or its children where a step has backwards in it."""
    return [module] if module.automatic_optimization else list(_called(module))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        elif not isinstance(child, _ONLY_PARAMETERS) and next(child.parameters(), None) is not None:
            yield child


def _holders(module: nn.Module, parts: Collection[nn.Module]) -> dict[nn.Parameter, set[nn.Module | None]]:
    """Return the parts that each parameter would be divided with."""
    found: dict[nn.Parameter, set[nn.Module | None]] = {}
    seen: set[tuple[nn.Module, nn.Module | None]] = set()

    def visit(one: nn.Module, part: nn.Module | None) -> None:
        part = one if one in parts else part
        if (one, part) not in seen:
            seen.add((one, part))
            for parameter in one.parameters(recurse=False):
                found.setdefault(parameter, set()).add(part)
            for child in one.children():
                visit(child, part)

    visit(module, None)
    return found
