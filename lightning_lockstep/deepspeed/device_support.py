"""What DeepSpeed would ignore or fail over, under Lightning's loop and on a CPU: refused by name, or replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_lockstep._settings import is_number, is_whole
from lightning_lockstep.deepspeed.config_parsing import is_given, section
from lightning_lockstep.errors import ConfigurationError

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

    @property
    def changes(self) -> dict[str, Any]:
        """What the replacement sets, by path."""
        return {self.path: self.instead, **self.also}

    def __str__(self) -> str:
        return " and ".join(f"{path}={value!r}" for path, value in self.changes.items())


def refuse_or_adapt(
    config: Mapping[str, Any], device_type: str, adapt: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration without what cannot be done, and a line of text for each replacement."""
    refused, adapted, lines = [], dict(config), []
    for one in (*_under_lightning(config), *(_on_a_cpu(config) if device_type == "cpu" else ())):
        if not adapt or one.instead is None:
            how = "Remove it" if one.instead is None else f"Write {one}, as adapt=True of the strategy does"
            refused.append(f"{one.path}={one.given!r}: {one.why}. {how}.")
            continue
        lines.append(f"{one} instead of {one.path}={one.given!r}: {one.why}.")
        for path, value in one.changes.items():
            inner = adapted
            *sections, key = path.split(".")
            for name in sections:
                inner[name] = inner = dict(section(inner, name))
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
    same_batch = "several ranks would need the same batch, and Lightning gives each rank its own"
    for path, size, least, why in (
        ("tensor_parallel.autotp_size", section(config, "tensor_parallel").get("autotp_size"), 2, same_batch),
        ("sequence_parallel_size", config.get("sequence_parallel_size"), 2, same_batch),
        (
            "zero_optimization.mics_shard_size",  # DeepSpeed 0.19.8 refuses it itself
            *(section(config, "zero_optimization").get("mics_shard_size"), 1),
            "a fit that goes on would have zeros for the weights of some ranks",
        ),
    ):
        if is_whole(size) and size >= least:
            yield Limit(path, size, why)
    if writer := section(config, "checkpoint").get("writer"):
        why = "DeepSpeed's writers need its own launcher, and may still write when the checkpoint counts as complete"
        yield Limit("checkpoint.writer", writer, why)
    zero, autocast = section(config, "zero_optimization"), section(config, "torch_autocast")
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
    """Yield what fails on a CPU; tests/variants/deepspeed/test_device_support.py asks DeepSpeed itself."""
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
