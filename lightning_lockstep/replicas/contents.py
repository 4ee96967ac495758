"""What a rank holds that the other ranks should hold too: tensors by name, settings, and how the run was made."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lockstep._lightning import PYTORCH, LightningModule, Trainer
from lightning_lockstep.distributed.guard.verify import parameters_in_words
from lightning_lockstep.distributed.sharded_state import is_divided, ranks_of_part
from lightning_lockstep.replicas.checksums import can_be_read
from lightning_lockstep.steps.capabilities import capabilities_of

Buffers = Literal["auto", "all", "none"]
#: Kinds of tensors, in the order in which differences are told.
SECTIONS = ("parameters", "buffers", "optimizer state")

# Each rank has its own running statistics of these; those of SyncBatchNorm, which is not one of them, are shared.
_OWN_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
Named = dict[str, Tensor]


class Contents:
    """The tensors of a run on this rank that others hold too, looked up anew each time they are asked for."""

    def __init__(self, trainer: Trainer, module: LightningModule, *, optimizer_state: bool, buffers: Buffers) -> None:
        self._trainer, self._module, self._buffers = trainer, module, buffers
        self._optimizer_state = optimizer_state
        #: The ranks that hold the same as this one, by name, of what is divided; the rest is whole on each rank.
        self.held: dict[str, tuple[int, ...]] = {}
        self._ranks: dict[Any, tuple[int, ...]] = {}  # the same, by mesh and placements
        # An engine that keeps gradients divides the optimizer's state too.
        capabilities = capabilities_of(trainer.strategy)
        self._whole_steps = capabilities.whole_gradients
        parts = [ranks_of_part(p) for p in module.parameters() if is_divided(p)]
        #: Whether some parameters are divided by torch itself, as by ``fully_shard``.
        self.divided = bool(parts)
        self.sees_gradients = self._whole_steps or self.divided
        #: Which weights, and the state of optimizers for them, are not compared, and why; or nothing.
        self.left_out = ""
        if not capabilities.same_weights:
            self.left_out = "weights are not compared: the strategy averages the models only from time to time"
        elif _is_fsdp(trainer):
            self.left_out = "weights are not compared: the strategy divides them"
        self._buffers_alone = bool(self.left_out)
        if any(len(ranks) < 2 for ranks in parts):
            self.left_out = "weights that one rank alone holds are not compared: the strategy divides them"

    def sections(self) -> dict[str, Named]:
        found: dict[str, Named] = {section: {} for section in SECTIONS}
        for name, buffer in self._chosen_buffers():
            self._add(found["buffers"], name, buffer)
        if self._buffers_alone:
            return found
        for name, parameter in self._module.named_parameters():
            self._add(found["parameters"], name, parameter)
        if self._optimizer_state:
            for name, value, of in self._states():
                self._add(found["optimizer state"], name, value, of)
        return found

    def gradients(self, optimizer: Optimizer) -> Named:
        """Return the gradients with which an optimizer is about to step."""
        found: Named = {}
        for name, parameter in self._parameters(optimizer):
            self._add(found, name, parameter.grad, parameter)
        return found

    def may_be_statistics(self) -> list[str]:
        """Return the buffers that may be what each rank has found in its own batches."""
        if self._buffers == "all":
            return []
        return [
            name
            for name, buffer in self._chosen_buffers()
            # One whole number counts the same everywhere.
            if (buffer.is_floating_point() or buffer.numel() > 1)
            and not isinstance(self._module.get_submodule(name.rpartition(".")[0]), nn.SyncBatchNorm)
        ]

    def trained(self) -> set[str]:
        return {name for name, parameter in self._module.named_parameters() if parameter.requires_grad}

    def _chosen_buffers(self) -> Iterator[tuple[str, Tensor]]:
        if self._buffers == "none":
            return
        own = set()
        if self._buffers == "auto":
            for path, module in self._module.named_modules():
                if isinstance(module, _OWN_STATISTICS):
                    own |= {f"{path}.{name}".lstrip(".") for name, _ in module.named_buffers(recurse=False)}
        yield from ((name, buffer) for name, buffer in self._module.named_buffers() if name not in own)

    def _states(self) -> Iterator[tuple[str, Any, Tensor]]:
        optimizers: Sequence[Any] = self._trainer.optimizers
        for number, optimizer in enumerate(optimizers):
            if hasattr(optimizer, "consolidate_state_dict"):
                continue  # ZeroRedundancyOptimizer: each rank has a part
            label = f"optimizer {number}: " if len(optimizers) > 1 else ""
            for name, parameter in self._parameters(optimizer):
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    yield f"{label}{key} of {name}", value, parameter

    def _parameters(self, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of an optimizer with names, unless an engine keeps their state."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for number, parameter in enumerate(parameters):
            if self._whole_steps or is_divided(parameter):
                yield names.get(parameter, f"parameter {number} of the optimizer, in no module"), parameter

    def _add(self, named: Named, name: str, value: Any, of: Tensor | None = None) -> None:
        """Add a value, such as the state of a parameter, if it is a tensor that other ranks hold too."""
        # What is kept for a part, such as a count of steps, may differ from that of other parts.
        part: Any = value if is_divided(value) else of
        self.held.pop(name, None)
        if is_divided(part):
            kind = part.device_mesh, part.placements
            if kind not in self._ranks:
                self._ranks[kind] = ranks_of_part(part)
            self.held[name] = self._ranks[kind]
            if len(self.held[name]) < 2:
                return
        if is_divided(value):
            with torch.no_grad():
                value = value.to_local()
        # ZeRO stage 3 divides parameters that have `ds_tensor`.
        if isinstance(value, Tensor) and can_be_read(value) and not hasattr(value, "ds_tensor"):
            named[name] = value


def _is_fsdp(trainer: Any) -> bool:
    """Return whether the model is wrapped by FSDP's first version, whose parts are plain tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # to import it takes long, and few use it
    return fsdp is not None and isinstance(trainer.strategy.model, fsdp.FullyShardedDataParallel)


# -- Settings and structure, as text by what they are about --


def hyperparameters(optimizers: Sequence[Any]) -> dict[str, str]:
    """Return what the optimizers step with now, such as ``optimizer 0, group 0, lr``."""
    return {
        f"optimizer {number}, group {index}, {key}": text
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names") and (text := _plain(value)) is not None
    }


def facts(trainer: Any, module: LightningModule) -> dict[str, str]:
    """Return all that must be the same on the ranks before the first step."""
    found: dict[str, str] = {}
    if not _is_fsdp(trainer):
        found = {f"parameter {number}": text for number, text in enumerate(parameters_in_words(module))}
    for number, optimizer in enumerate(trainer.optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        found[f"optimizer {number}"] = f"{type(optimizer).__name__}, parameters in its groups: {sizes}"
    found |= hyperparameters(trainer.optimizers)
    for number, config in enumerate(trainer.lr_scheduler_configs):
        kind = type(config.scheduler).__name__
        found[f"scheduler {number}"] = f"{kind}, each {config.frequency} {config.interval}"
    found["precision"] = str(trainer.precision)
    found["batches a step"] = str(trainer.accumulate_grad_batches)
    # Some ranks may have more batches than the run takes.
    most = trainer.max_steps * trainer.accumulate_grad_batches if trainer.max_steps >= 0 else float("inf")
    found["batches an epoch"] = str(min(trainer.num_training_batches, most))
    for package in ("torch", PYTORCH.partition(".")[0], "lightning_lockstep"):
        found[f"version of {package}"] = sys.modules[package].__version__
    return found


def _plain(value: Any) -> str | None:
    """Return a value of plain data as text; of anything else the text may differ though the value does not."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return None
