"""The ops of DeepSpeed that a config needs, which are compiled, and whether they can be had here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_lockstep._doors.deepspeed_internals import (
    is_compatible,
    is_installed,
    make_op_builder,
    op_name,
)
from lightning_lockstep.deepspeed.builds.tools import OPS, missing_tools
from lightning_lockstep.deepspeed.configuration.reading import modern_spelling, section, stage_of
from lightning_lockstep.deepspeed.importing import import_deepspeed

__all__ = ["QUANTIZING", "can_build_op", "is_offloaded", "needed_ops", "op_of_optimizer", "sections_on_nvme"]

#: Keys of ZeRO by which stage 3 quantizes, with an op for CUDA.
QUANTIZING = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_OFFLOADED = ("cpu", "nvme")


def needed_ops(config: Mapping[str, Any], device_type: str, *, fits: bool = True) -> list[str]:
    """Return the ops of DeepSpeed that a config cannot do without, such as ``cpu_adam``."""
    asked = modern_spelling(config)
    of_optimizer = op_of_optimizer(asked) if fits else None  # no optimizer is made for evaluation
    on_nvme = [name for name in sections_on_nvme(asked) if fits or name == "offload_param"]
    ops = [] if of_optimizer is None else [of_optimizer]
    ops += ["async_io"] if on_nvme else []
    return ops + (["quantizer"] if device_type == "cuda" and _quantizes(asked) else [])


def _quantizes(config: Mapping[str, Any]) -> bool:
    zero = section(config, "zero_optimization")
    return stage_of(config) == 3 and any(zero.get(name) is True for name in QUANTIZING)


def can_build_op(op: str, device_type: str) -> bool:
    """Return whether an op of DeepSpeed is installed, or can be compiled when it is first used."""
    import_deepspeed(device_type)
    builder = make_op_builder(OPS[op])
    if builder is None or op_name(builder) != op:
        return False  # the CPU has a builder of nothing in its place
    if is_installed(op):
        return True
    return _has_toolkit(device_type) and not missing_tools([op]) and is_compatible(builder)


def _has_toolkit(device_type: str) -> bool:
    if device_type != "cuda":
        return True
    from torch.utils.cpp_extension import CUDA_HOME

    return CUDA_HOME is not None


def op_of_optimizer(config: Mapping[str, Any]) -> str | None:  # in today's spelling
    """Return the op without which the optimizer of a config cannot be made."""
    kind = str(section(config, "optimizer").get("type", "")).lower()
    is_torch = section(config, "optimizer", "params").get("torch_adam") is True
    if is_offloaded(config):
        ops = {
            "adam": "cpu_adam",
            "adamw": "cpu_adam",
            "adagrad": "cpu_adagrad",
            "lion": "cpu_lion",
            "muon": "cpu_adam",
        }
    else:
        ops = {"adam": "fused_adam", "adamw": "fused_adam", "lion": "fused_lion"}
    ops["lamb"] = "fused_lamb"
    return None if is_torch and kind in ("adam", "adamw", "muon") else ops.get(kind)


def sections_on_nvme(config: Mapping[str, Any]) -> list[str]:  # in today's spelling
    """Return the names of the sections of ZeRO whose device is NVMe."""
    zero = section(config, "zero_optimization")
    return [
        name for name in ("offload_optimizer", "offload_param") if section(zero, name).get("device") == "nvme"
    ]


def is_offloaded(config: Mapping[str, Any]) -> bool:  # in today's spelling
    """Return whether the optimizer states of a config are kept off the device."""
    return section(config, "zero_optimization", "offload_optimizer").get("device") in _OFFLOADED
