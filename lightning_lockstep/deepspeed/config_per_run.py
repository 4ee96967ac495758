"""The configuration of a strategy in each of its runs: what the Trainer, the loader and the module add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._settings import Faults
from lightning_lockstep._trainer import given_to_trainer
from lightning_lockstep.deepspeed.config_parsing import (
    AUTO,
    TrainerValues,
    completed,
    for_evaluation,
    is_given,
    section,
)
from lightning_lockstep.deepspeed.device_support import refuse_or_adapt
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.precision import requested_precision
from lightning_lockstep.steps.patching import batch_size_of


def device_type_given() -> str | None:
    """Return the type of the devices that DeepSpeed is to be imported for, if that is known."""
    accelerator = given_to_trainer("accelerator")
    if accelerator == "cpu" or not torch.accelerator.is_available():
        return "cpu"
    return "cuda" if accelerator in ("gpu", "cuda") and torch.cuda.is_available() else None


class RunConfig:
    """What the user has given, without what cannot be done here, and what follows from it for each run."""

    def __init__(self, given: Mapping[str, Any], *, adapt: bool, say: Callable[[str], None]) -> None:
        self.given = dict(given)  # not completed
        self._may_adapt, self._say = adapt, say  # say prints a line, once for all ranks
        self._accumulation_given = False
        self._accumulation_set: int | None = None  # by a fit before, from the configuration

    def check_trainer(self, devices: Sequence[torch.device], device_type: str, world_size: int) -> None:
        """Hold the configuration against the Trainer under construction, DeepSpeed's parser and the devices."""
        # An accumulation of 1, the default, counts as not given: a program such as ours gives the Trainer all its
        # defaults.
        accumulation = given_to_trainer("accumulate_grad_batches")
        self._accumulation_given = accumulation not in (None, 1)
        values = TrainerValues(
            precision=requested_precision(),
            accumulate_grad_batches=accumulation if self._accumulation_given else None,
            gradient_clip_val=given_to_trainer("gradient_clip_val"),
        )
        faults = Faults()
        indices = [device.index for device in devices if device.type == "cuda"]
        faults.check(
            indices == list(range(len(indices))),
            "devices",
            indices,
            "the first GPUs in their order, because DeepSpeed takes the local rank for the index of the GPU: hide the"
            " others with CUDA_VISIBLE_DEVICES",
        )
        try:
            completed(self.given, values, world_size)
        except ConfigurationError as error:
            faults.texts += error.faults
        faults.raise_all()
        self.given, replaced = refuse_or_adapt(self.given, device_type, self._may_adapt)
        for line in replaced:
            self._say(line)
        if device_type == "cpu" or self._may_adapt:
            # DeepSpeed then takes torch's optimizers for offloading, which it refuses because its own are faster.
            self.given.setdefault("zero_force_ds_cpu_optimizer", False)

    def of_fit(self, trainer: Any, *, precision: str, world_size: int) -> dict[str, Any]:
        """Return the complete configuration of a fit that begins; on all ranks together."""
        # The layers of the module are made by then. The loader is asked only if the configuration needs it, because
        # that calls the user's hooks.
        sizes = {"train_micro_batch_size_per_gpu", "train_batch_size"}
        values = TrainerValues(
            precision=precision,
            accumulate_grad_batches=self._accumulation_of(trainer),
            gradient_clip_val=trainer.gradient_clip_val,
            batch_size=_batch_size(trainer) if sizes & self.given.keys() else None,
        )
        config = completed(self.given, values, world_size)
        # The Trainer counts the steps by it.
        trainer.accumulate_grad_batches = self._accumulation_set = config["gradient_accumulation_steps"]
        if "optimizer" in config or "scheduler" in config:  # asks the module's hook once more
            faults = Faults()
            config |= with_module_optimizer(config, trainer, faults)
            faults.raise_all()
            if "optimizer" in config:
                kind = config["optimizer"].get("type")
                self._say(
                    f"the optimizer of DeepSpeed's configuration ({kind}) is used; configure_optimizers only gives what"
                    " is 'auto' there."
                )
        return config

    def of_evaluation(self, precision: str) -> dict[str, Any]:
        """Return the complete configuration if nothing is trained, or the model is still to be made."""
        return completed(for_evaluation(self.given), TrainerValues(precision=precision), 1)

    def _accumulation_of(self, trainer: Any) -> int | None:
        """Return the accumulation that the user or a callback has asked the Trainer for; ``None`` without one."""
        now: int = trainer.accumulate_grad_batches
        return now if self._accumulation_given or now not in (1, self._accumulation_set) else None


def _batch_size(trainer: Any) -> int | None:
    """Return the size of the batches of the training loader, if it has one loader and says so."""
    source = trainer.fit_loop._data_source  # where it gets its loaders from
    if not source.is_defined():
        return None
    loader = source.dataloader()
    return batch_size_of(getattr(loader, "batch_sampler", None)) or batch_size_of(loader)


# -- What ``configure_optimizers`` of a module returns, with an optimizer or a scheduler of the configuration --
# DeepSpeed makes one optimizer and one scheduler. If the configuration has its own, Lightning never asks the module for
# an optimizer, and DeepSpeed takes the module's scheduler silently: learning rates and schedules would be lost.

_OPTIONS = ("lr", "betas", "eps", "weight_decay")


def with_module_optimizer(config: Mapping[str, Any], trainer: Any, faults: Faults) -> dict[str, Any]:
    """Return optimizer and scheduler of the configuration, with the module's values for what is ``auto`` in them."""
    parts = list(_parts(trainer.lightning_module.configure_optimizers()))
    optimizer = next((part for part in parts if hasattr(part, "param_groups")), None)
    scheduler = next((part for part in parts if not hasattr(part, "param_groups")), None)
    if scheduler is not None:
        name = "scheduler" if "scheduler" in config else "optimizer"
        faults.add(
            f"{name}.type={section(config, name).get('type')!r} in the config and a {type(scheduler).__name__} of"
            " configure_optimizers: expected optimizer and scheduler in one of the two."
        )
    groups = [] if optimizer is None else [_options(group) for group in optimizer.param_groups]
    params = section(config, "optimizer", "params")
    for name in _OPTIONS:
        for other in (group[name] for group in groups if name in group):
            if is_given(params.get(name)) and _simple(params[name]) != other:
                faults.add(
                    f"optimizer.params.{name}={params[name]!r} in the config and {name}={other!r} of"
                    " configure_optimizers: expected one of the two, or 'auto' in the config."
                )
                break
    known = {} if optimizer is None else _options(optimizer.defaults)
    lr = params["lr"] if is_given(params.get("lr")) else known.get("lr")
    # Zero steps are refused by DeepSpeed from 0.19.6 on; before, it made two of them.
    schedule = {"warmup_min_lr": 0, "warmup_max_lr": lr, "warmup_num_steps": 1}
    if section(config, "scheduler", "params").get("total_num_steps") == AUTO:
        schedule["total_num_steps"] = _total_steps(trainer)
    return {
        name: {**config[name], "params": _filled(section(config, name, "params"), values, name, faults)}
        for name, values in (("optimizer", known), ("scheduler", schedule))
        if "params" in section(config, name)
    }


def _filled(params: Mapping[str, Any], known: Mapping[str, Any], name: str, faults: Faults) -> dict[str, Any]:
    filled = {key: known.get(key) if value == AUTO else value for key, value in params.items()}
    for key, value in params.items():
        if value == AUTO and filled[key] is None:
            faults.add(
                f"{name}.params.{key}='auto': neither configure_optimizers nor the Trainer gives it. Write a number."
            )
    return filled


def _total_steps(trainer: Any) -> int | None:
    """Return the optimizer steps of a fit by the Trainer's accumulation; ``None`` if nobody knows."""
    steps = trainer.estimated_stepping_batches  # makes the loaders, on all ranks together
    return int(steps) if steps != float("inf") and steps > 0 else None


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
    return {name: _simple(given[name]) for name in _OPTIONS if name in given}


def _simple(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
