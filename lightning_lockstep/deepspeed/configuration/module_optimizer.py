"""What ``configure_optimizers`` of a module returns, beside an optimizer or a scheduler of the config.

DeepSpeed makes one optimizer and one scheduler. Where the config names its own, Lightning never asks the module for an
optimizer, and DeepSpeed takes the module's scheduler silently: learning rates and schedules would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed.configuration.reading import is_given, section

__all__ = ["ModuleOptimizer", "check_module_optimizer", "optimizer_of"]

_OPTIONS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class ModuleOptimizer:
    """Optimizer and scheduler of a module, the first ones if there are several."""

    kind: str | None = None  # class of the optimizer; None: the module makes none
    defaults: Mapping[str, Any] | None = None  # its options that DeepSpeed's optimizers have too
    groups: Sequence[Mapping[str, Any]] = ()  # the same of each group of parameters
    scheduler: str | None = None  # class of the scheduler; None: the module makes none


def optimizer_of(module: Any) -> ModuleOptimizer:  # its layers are made
    """Return what a module makes, by its hook."""
    parts = list(_parts(module.configure_optimizers()))
    optimizer = next((part for part in parts if hasattr(part, "param_groups")), None)
    scheduler = next((part for part in parts if not hasattr(part, "param_groups")), None)
    named = None if scheduler is None else type(scheduler).__name__
    if optimizer is None:
        return ModuleOptimizer(scheduler=named)
    return ModuleOptimizer(
        type(optimizer).__name__,
        _options(optimizer.defaults),
        [_options(group) for group in optimizer.param_groups],
        named,
    )


def check_module_optimizer(config: Mapping[str, Any], made: ModuleOptimizer, faults: Faults) -> None:
    """Add a fault for what a module makes and the config says otherwise."""
    own, scheduler = section(config, "optimizer"), section(config, "scheduler")
    if made.scheduler is not None and scheduler:
        faults.add(
            f"scheduler.type={scheduler.get('type')!r} in the config and a {made.scheduler} of configure_optimizers:"
            " expected one scheduler. Leave out one of the two."
        )
    elif made.scheduler is not None and own:
        faults.add(
            f"optimizer.type={own.get('type')!r} in the config and a {made.scheduler} of configure_optimizers, which"
            " would change the learning rate of the module's own optimizer, and that one is not used: expected the"
            " scheduler beside the optimizer that is used. Write it as scheduler of the config too, or leave the"
            " optimizer out of the config."
        )
    params = section(own, "params")
    for name in _OPTIONS:
        values = [group[name] for group in made.groups if name in group]
        others = [value for value in values if is_given(params.get(name)) and value != _plain(params[name])]
        if others:
            where = "of configure_optimizers" if len(values) == 1 else "in a group of configure_optimizers"
            faults.add(
                f"optimizer.params.{name}={params[name]!r} in the config and {name}={others[0]!r} {where}: expected the"
                " same in both, as the optimizer of the config is the one that is used, with one group of all"
                f" parameters. Write {name}: 'auto' in the config, or leave the optimizer out of one of the two."
            )


def _parts(made: Any) -> Iterator[Any]:
    """Yield the optimizers and schedulers in whatever form a module has returned them."""
    if isinstance(made, Mapping):
        for name in ("optimizer", "lr_scheduler", "scheduler"):
            yield from _parts(made.get(name))
    elif isinstance(made, (list, tuple)):
        for one in made:
            yield from _parts(one)
    elif made is not None:
        yield made


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(given[name]) for name in _OPTIONS if name in given}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
