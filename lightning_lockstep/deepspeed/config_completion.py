"""The complete configuration of a run: every `auto` filled in, the module's own optimizer taken up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._settings import Faults, is_number, is_whole
from lightning_lockstep.deepspeed.config import (
    AUTO,
    for_evaluation,
    is_given,
    modern_spelling,
    section,
    stage_of,
    without_nulls,
)
from lightning_lockstep.deepspeed.config_checks import (
    PRECISION_OF,
    PRECISIONS,
    TrainerValues,
    batch_of,
    check_against_trainer,
    check_devices,
    run_values,
    total_steps,
    values_given,
)
from lightning_lockstep.deepspeed.device_support import limits, refuse_or_adapt
from lightning_lockstep.deepspeed.known_keys import check_keys, is_comment

# -- A config that is complete: what it leaves open is filled in from the Trainer, the loader or the model

_NEVER = 10**12  # steps between two prints of DeepSpeed

# Sections that DeepSpeed reads with its own models, which take "auto" for "the default"; and places where it is the
# default itself.
_AUTO_IS_DEFAULT = (
    "zero_optimization",
    "fp16",
    "bf16",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "comms_logger",
    "compile",
    "hybrid_engine",
    "tensor_parallel",
    "timers",
    "weight_quantization",
    "expert_parallel",
    "pipeline",
    "data_types",
)


def completed(config: Mapping[str, Any], values: TrainerValues) -> dict[str, Any]:
    """Return a config with no ``"auto"``, comments or defaults that differ from the Trainer's; what it says stays."""
    faults = Faults()
    full = _without(modern_spelling(config), lambda key, _: is_comment(key))
    _fill_precision(full, values.precision)
    _fill_batch(full, values)
    _fill(full, "gradient_clipping", float(values.gradient_clip_val or 0.0))
    _fill(full, "zero_allow_untested_optimizer", True)
    _fill(full, "steps_per_print", _NEVER)
    _fill_optimizer(full, values)
    _fill_scheduler(full, values)
    _fill_buckets(full, values.hidden_size)
    for name in _AUTO_IS_DEFAULT:
        if isinstance(full.get(name), dict):
            full[name] = _without(full[name], lambda _, value: value == AUTO)
    _refuse_auto(full, "", faults)
    faults.raise_all()
    return full


def _fill(config: dict[str, Any], key: str, value: object) -> None:
    if not is_given(config.get(key)):
        config[key] = value


def _fill_precision(config: dict[str, Any], precision: str | None) -> None:
    wanted = PRECISIONS.get(precision or "")
    for name in PRECISION_OF:
        if name == wanted and config.get(name) is None:
            config[name] = {}
        if config.get(name) is not None and isinstance(config[name], dict):
            _fill(config[name], "enabled", name == wanted)


def _fill_batch(config: dict[str, Any], values: TrainerValues) -> None:
    batch = batch_of(config, values).deduced()
    if batch.whole is not None and batch.ranks is None:
        # DeepSpeed, which knows the number of ranks, deduces what is missing.
        known = {
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        }
    else:
        micro, accumulation = batch.micro or 1, batch.accumulation or 1
        known = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
        if batch.whole != micro * accumulation * (batch.ranks or 1):
            config.pop("train_batch_size", None)
    for key, size in known.items():
        if size is not None:
            _fill(config, key, size)
        elif not is_given(config.get(key)):
            config.pop(key, None)


def _fill_optimizer(config: dict[str, Any], values: TrainerValues) -> None:
    params = section(config, "optimizer").get("params")
    if isinstance(params, dict):
        _fill_auto(params, values.optimizer_defaults or {})


def _fill_scheduler(config: dict[str, Any], values: TrainerValues) -> None:
    params = section(config, "scheduler").get("params")
    if not isinstance(params, dict):
        return
    # Zero steps are refused by DeepSpeed from 0.19.6 on; before, it made two of them.
    known: dict[str, Any] = {"warmup_min_lr": 0, "warmup_num_steps": 1}
    lr = section(config, "optimizer", "params").get("lr", (values.optimizer_defaults or {}).get("lr"))
    if is_number(lr):
        known["warmup_max_lr"] = lr
    if is_whole(values.total_steps) and values.total_steps > 0:
        known["total_num_steps"] = values.total_steps
    _fill_auto(params, known)


def _fill_buckets(config: dict[str, Any], hidden_size: int | None) -> None:
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or hidden_size is None:
        return
    area = hidden_size * hidden_size
    sizes = {"reduce_bucket_size": area}
    if stage_of(config) == 3:
        sizes |= {"prefetch_bucket_size": int(0.9 * area), "param_persistence_threshold": 10 * hidden_size}
    _fill_auto(zero, sizes | {f"stage3_{name}": size for name, size in sizes.items()})


def _fill_auto(params: dict[str, Any], known: Mapping[str, Any]) -> None:
    for key, value in params.items():
        if value == AUTO and key in known:
            params[key] = list(known[key]) if isinstance(known[key], tuple) else known[key]


def _without(inner: dict[str, Any], is_left_out: Callable[[str, Any], bool]) -> dict[str, Any]:
    return {
        key: _without(value, is_left_out) if isinstance(value, dict) else value
        for key, value in inner.items()
        if not is_left_out(key, value)
    }


def _refuse_auto(inner: Mapping[str, Any], path: str, faults: Faults) -> None:
    for key, value in inner.items():
        here = f"{path}{key}"
        if isinstance(value, Mapping):
            _refuse_auto(value, f"{here}.", faults)
        elif isinstance(value, str) and value == AUTO:
            faults.add(f"{here}='auto': {_instead_of_auto(here)}")


def _instead_of_auto(path: str) -> str:
    if path == "scheduler.params.total_num_steps":
        return (
            "the number of steps is not known. Write a number, or give the Trainer max_steps, or max_epochs and a"
            " loader with a length."
        )
    if path.startswith("optimizer.params.") or path == "scheduler.params.warmup_max_lr":
        return "configure_optimizers returns no optimizer that has this setting. Write a number."
    return (
        "its value cannot be derived from the Trainer, the optimizer or the model. Set it, or remove the key to use"
        " DeepSpeed's default."
    )


# -- What ``configure_optimizers`` of a module returns, with an optimizer or a scheduler of the config --
# DeepSpeed makes one optimizer and one scheduler. Where the config names its own, Lightning never asks the
# module for an optimizer, and DeepSpeed takes the module's scheduler silently: learning rates and schedules
# would be lost.

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
    """Add an error for what a module makes and the config says otherwise."""
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
            " scheduler in the same place as the optimizer. Write it as scheduler of the config too, or leave the"
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


# -- The configuration of a strategy, from what the user has given to what DeepSpeed gets in each run --


class RunConfig:
    """What the user has given, without what cannot be done here, and what follows from it for each run."""

    def __init__(self, given: Mapping[str, Any], *, adapt: bool, say: Callable[[str], None]) -> None:
        faults = Faults()
        check_keys(given, faults)
        faults.raise_all()
        self.given = without_nulls(given)  # not completed
        self._may_adapt, self._say = adapt, say  # say prints a line, once for all ranks
        self._accumulation_given = False
        self._accumulation_set: int | None = None  # by a fit before, from the configuration

    def check_trainer(self, devices: Sequence[torch.device], device_type: str) -> None:
        """Hold the configuration against the Trainer under construction and what its devices can do."""
        faults = Faults()
        values = values_given()
        self._accumulation_given = values.accumulate_grad_batches is not None
        check_against_trainer(self.given, values, faults)
        check_devices(devices, faults)
        faults.raise_all()
        self.given = self.adapted(self.given, device_type)

    def adapted(
        self, config: Mapping[str, Any], device_type: str, client_optimizer: type | None = None
    ) -> dict[str, Any]:
        """Return a configuration without what cannot be done on a device; each replacement is said."""
        found = limits(config, device_type, client_optimizer=client_optimizer)
        adapted, replaced = refuse_or_adapt(config, found, self._may_adapt)
        for line in replaced:
            self._say(line)
        return adapted

    def of_fit(self, trainer: Any, *, precision: str, world_size: int) -> dict[str, Any]:
        """Return the complete configuration of a fit that begins; on all ranks together."""
        # The layers of the module are made by then. The accumulation of the configuration becomes the
        # Trainer's, which counts the steps by it.
        values = run_values(
            trainer,
            self.given,
            precision=precision,
            world_size=world_size,
            accumulation=self._accumulation_of(trainer),
        )
        faults = Faults()
        check_against_trainer(self.given, values, faults)
        faults.raise_all()
        # Before the steps are counted, of which there are fewer then.
        trainer.accumulate_grad_batches = batch_of(self.given, values).deduced().accumulation or 1
        self._accumulation_set = trainer.accumulate_grad_batches
        made = self._made_by(trainer.lightning_module)
        values = replace(
            values,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            total_steps=total_steps(trainer) if self._asks_for_steps() else None,
            optimizer_defaults=made.defaults,
        )
        config = completed(self.given, values)
        check_module_optimizer(config, made, faults)
        faults.raise_all()
        if made.kind is not None and "optimizer" in config:
            self._say(
                f"the optimizer of DeepSpeed's configuration ({config['optimizer'].get('type')}) is used, and of the"
                f" {made.kind} that configure_optimizers returns only what is 'auto' there."
            )
        return config

    def of_evaluation(self, precision: str) -> dict[str, Any]:
        """Return the complete configuration where nothing is trained, or the model is still to be made."""
        needed, values = for_evaluation(modern_spelling(self.given)), TrainerValues(precision=precision)
        faults = Faults()
        check_against_trainer(needed, values, faults)
        faults.raise_all()
        return completed(needed, values)

    def _accumulation_of(self, trainer: Any) -> int | None:
        """Return the accumulation that the user or a callback has asked the Trainer for; ``None`` without one."""
        now: int = trainer.accumulate_grad_batches
        return now if self._accumulation_given or now not in (1, self._accumulation_set) else None

    def _made_by(self, module: Any) -> ModuleOptimizer:
        # Only where the configuration needs it, since that calls the user's hook once more.
        asks = "optimizer" in self.given or "scheduler" in self.given
        return optimizer_of(module) if asks else ModuleOptimizer()

    def _asks_for_steps(self) -> bool:
        params = (self.given.get("scheduler") or {}).get("params") or {}
        return params.get("total_num_steps") == "auto"
