"""The configuration of a strategy in each run: what cannot be done here, what Trainer, loader and module add."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._lightning import _configure_optimizers
from lightning_lockstep._settings import Faults, is_number, is_whole
from lightning_lockstep._trainer import given_to_trainer
from lightning_lockstep.deepspeed.config_parsing import (
    AUTO,
    TrainerValues,
    completed,
    for_evaluation,
    is_given,
    section,
)
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.precision import requested_precision
from lightning_lockstep.steps.patching import batch_size_of

# -- What DeepSpeed would ignore or fail over, under Lightning's loop and on a CPU: refused by name, or replaced --

_FLOAT16 = ("fp16", "float16", "half", "torch.float16", "torch.half")
_QUANTIZING = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


@dataclass(frozen=True)
class Limit:
    """A key of a configuration that asks for what cannot be done."""

    path: str  # of the key, such as fp16.enabled
    given: Any
    why: str  # as a clause
    instead: Any = None  # value that does the same, or nearly; None: there is none, so remove the key
    also: Mapping[str, Any] = field(default_factory=dict)  # other keys that the replacement sets, by path


def refuse_or_adapt(config: Mapping[str, Any], device_type: str, adapt: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration without what cannot be done, and a line of text for each replacement."""
    refused, adapted, lines = [], dict(config), []
    for one in (*_under_lightning(config), *(_on_a_cpu(config) if device_type == "cpu" else ())):
        changes = {one.path: one.instead, **one.also}
        text = " and ".join(f"{path}={value!r}" for path, value in changes.items())
        if not adapt or one.instead is None:
            how = "Remove it" if one.instead is None else f"Write {text}, as adapt=True of the strategy does"
            refused.append(f"{one.path}={one.given!r}: {one.why}. {how}.")
            continue
        lines.append(f"{text} instead of {one.path}={one.given!r}: {one.why}.")
        for path, value in changes.items():
            inner = adapted
            *sections, key = path.split(".")
            for name in sections:
                inner[name] = dict(section(inner, name))
                inner = inner[name]
            inner[key] = value
    if refused:
        raise ConfigurationError(refused)
    return adapted, lines


def _under_lightning(config: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield what works only if DeepSpeed's own loop, loader or model calls it, and what its stage ignores."""
    if config.get("managed_gradient_accumulation") is False:
        why = "the engine would step after every batch, also if batches are accumulated"
        yield Limit("managed_gradient_accumulation", False, why, True)
    if section(config, "compile").get("deepcompile") is True:
        why = "DeepCompile begins with engine.compile(), which Lightning does not call"
        yield Limit("compile.deepcompile", True, why, False)
    if section(config, "data_efficiency", "data_sampling").get("enabled") is True:
        why = "DeepSpeed chooses the samples in its own loader, and Lightning's is used"
        yield Limit("data_efficiency.data_sampling.enabled", True, why, False)
    if section(config, "pipeline"):
        why = "DeepSpeed divides only its own PipelineModule in stages, which Lightning cannot train"
        yield Limit("pipeline", config["pipeline"], why)
    zero = section(config, "zero_optimization")
    same_batch = "several ranks would need the same batch, and Lightning gives each rank its own"
    no_weights = "a fit that goes on would have zeros for the weights of some ranks"
    for path, size, least, why in (
        ("tensor_parallel.autotp_size", section(config, "tensor_parallel").get("autotp_size"), 2, same_batch),
        ("sequence_parallel_size", config.get("sequence_parallel_size"), 2, same_batch),
        # DeepSpeed 0.19.8 refuses this one itself.
        ("zero_optimization.mics_shard_size", zero.get("mics_shard_size"), 1, no_weights),
    ):
        if is_whole(size) and size >= least:
            yield Limit(path, size, why)
    if writer := section(config, "checkpoint").get("writer"):
        why = "DeepSpeed's writers need its own launcher, and may still write when the checkpoint counts as complete"
        yield Limit("checkpoint.writer", writer, why)
    autocast = section(config, "torch_autocast")
    stage, dtype = zero["stage"], autocast.get("dtype")
    if autocast.get("enabled") is True and str(dtype).lower() in _FLOAT16 and stage > 0:
        why = "with ZeRO nothing lowers its loss scale when gradients overflow, so no more steps are taken"
        yield Limit("torch_autocast.dtype", dtype, why, "bfloat16")
    for name, on_cpu in (("offload_optimizer", 1), ("offload_param", 3)):
        device = section(zero, name).get("device")
        least = {"cpu": on_cpu, "nvme": 3}.get(str(device), 0)
        if stage < least:
            why = f"stage {stage} ignores it; expected stage {least}" + (" or higher" if least < 3 else "")
            yield Limit(f"zero_optimization.{name}.device", device, why, "none")
        elif device == "nvme" and not _has_async_io():
            why = "DeepSpeed's op async_io cannot be built: it needs the library aio (libaio-dev) and a C++ compiler"
            yield Limit(f"zero_optimization.{name}.device", device, why, "cpu")


def _has_async_io() -> bool:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops  # those that were built ahead of time

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return bool(installed_ops.get("async_io") or builder.is_compatible(verbose=False))


def _on_a_cpu(config: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield what fails on a CPU; tests/unit/deepspeed/test_device_support.py asks DeepSpeed itself."""
    # What works there, if only for show: pinned memory, overlap_comm, communication_data_type,
    # zero_hpz_partition_size, and quantizing below stage 3.
    from deepspeed.accelerator import get_accelerator

    if section(config, "fp16").get("enabled") is True and not get_accelerator().is_fp16_supported():
        why = "this CPU does not compute in float16; bfloat16 works on every CPU"
        yield Limit("fp16.enabled", True, why, False, also={"bf16.enabled": True})
    zero = section(config, "zero_optimization")
    offload = section(zero, "offload_optimizer")
    for name in _QUANTIZING:
        if zero.get(name) is True and zero["stage"] == 3:
            yield Limit(f"zero_optimization.{name}", True, "DeepSpeed quantizes with an op for CUDA", False)
    if is_given(zero.get("zenflow")):
        yield Limit("zero_optimization.zenflow", zero["zenflow"], "ZenFlow is written for CUDA")
    ratio = offload.get("ratio")
    if is_number(ratio) and ratio < 1:
        why = "all of it is in the host's memory anyway"
        yield Limit("zero_optimization.offload_optimizer.ratio", ratio, why, 1.0)
    if offload.get("super_offload") is True and zero["stage"] == 3:
        path = "zero_optimization.offload_optimizer.super_offload"
        yield Limit(path, True, "SuperOffload is written for CUDA", False)
    activations = section(config, "activation_checkpointing")
    if activations.get("cpu_checkpointing") is True and activations.get("partition_activations") is not True:
        why = "activations are in the host's memory anyway, and DeepSpeed loses them when it moves them there"
        yield Limit("activation_checkpointing.cpu_checkpointing", True, why, False)
    if section(config, "aio").get("use_gds") is True:
        yield Limit("aio.use_gds", True, "GPUDirect Storage is between a drive and a CUDA device", False)
    kind = section(config, "optimizer").get("type")
    is_offloaded = offload.get("device") in ("cpu", "nvme")
    if str(kind).lower() == "lamb" or (str(kind).lower() == "lion" and not is_offloaded):
        why = "DeepSpeed has its op for CUDA alone; let configure_optimizers return the optimizer"
        yield Limit("optimizer.type", kind, why)


# -- The configuration of each run --


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
        """Check the configuration against the Trainer under construction, DeepSpeed's parser and the devices."""
        # An accumulation of 1, the default, counts as not given: lockstep-train gives the Trainer all defaults.
        accumulation = given_to_trainer("accumulate_grad_batches")
        self._accumulation_given = accumulation not in (None, 1)
        values = TrainerValues(
            precision=requested_precision(),
            accumulate_grad_batches=accumulation if self._accumulation_given else None,
            gradient_clip_val=given_to_trainer("gradient_clip_val"),
        )
        faults = Faults()
        indices = [device.index for device in devices if device.type == "cuda"]
        expected = (
            "the first GPUs in their order, because DeepSpeed takes the local rank for the index of the GPU: hide the"
            " others with CUDA_VISIBLE_DEVICES"
        )
        faults.check(indices == list(range(len(indices))), "devices", indices, expected)
        try:
            completed(self.given, values, world_size)
        except ConfigurationError as error:
            faults.texts += error.faults
        faults.raise_all()
        self.given, replaced = refuse_or_adapt(self.given, device_type, self._may_adapt)
        for line in replaced:
            self._say(line)
        if device_type == "cpu" or self._may_adapt:
            # DeepSpeed refuses torch's optimizers for offloading, as its own are faster; this key makes it take them.
            self.given.setdefault("zero_force_ds_cpu_optimizer", False)

    def of_fit(self, trainer: Any, *, precision: str, world_size: int) -> dict[str, Any]:
        """Return the complete configuration of a fit that begins; on all ranks together."""
        # The layers of the module are made by then. The loader, which calls the user's hooks, is asked only if needed.
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
    made = trainer.lightning_module.configure_optimizers()
    optimizers, schedulers, _ = _configure_optimizers([] if made is None else made)
    optimizer, scheduler = next(iter(optimizers), None), next(iter(schedulers), None)
    if isinstance(scheduler, Mapping):
        scheduler = scheduler["scheduler"]
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
        steps = trainer.estimated_stepping_batches  # makes the loaders, on all ranks together
        schedule["total_num_steps"] = int(steps) if 0 < steps < math.inf else None  # None: nobody knows
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


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _simple(given[name]) for name in _OPTIONS if name in given}


def _simple(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
