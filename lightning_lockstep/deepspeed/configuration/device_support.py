"""What a config asks of DeepSpeed that it cannot do on this device here, and what can be put in its place.

DeepSpeed finds out on every rank, when it makes the engine or later, and mostly by an assertion. What stands here was
tried with DeepSpeed 0.19.8 on two ranks; ``tests/deepspeed/test_device_support.py`` tries it again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from lightning_lockstep._settings import is_number
from lightning_lockstep.deepspeed.configuration.adapting import Limit
from lightning_lockstep.deepspeed.configuration.ops import (
    can_build_op,
    is_offloaded,
    op_of_optimizer,
    sections_on_nvme,
)
from lightning_lockstep.deepspeed.configuration.reading import modern_spelling, section, stage_of
from lightning_lockstep.deepspeed.configuration.unsupported import on_a_cpu, on_any_device

__all__ = ["limits"]

# Ops that DeepSpeed has for the CPU too.
_CPU_OPS = ("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam")
# Parameters of DeepSpeed's Adam that torch's does not take.
_NOT_OF_TORCH_ADAM = ("bias_correction", "set_grad_none")
# Optimizers of DeepSpeed that update on the CPU what is offloaded.
_OF_DEEPSPEED = {"DeepSpeedCPUAdam", "DeepSpeedCPULion", "ZenFlowCPUAdam"}
_RATIO = "zero_optimization.offload_optimizer.ratio"


def limits(
    config: Mapping[str, Any],
    device_type: str,
    *,
    can_build_ops: Callable[[str], bool] | None = None,  # whether an op is, or can be, built here
    client_optimizer: type | None = None,  # of configure_optimizers, where it is known
) -> list[Limit]:
    """Return what a config asks for that DeepSpeed cannot do here."""
    asked = modern_spelling(config)
    can_build = can_build_ops or partial(can_build_op, device_type=device_type)
    found = [
        *on_any_device(asked),
        *_of_optimizer(asked, device_type, can_build),
        *_of_nvme(asked, can_build),
        *_of_ratio(asked, client_optimizer),
    ]
    if client_optimizer is not None:
        found += _of_client_optimizer(asked, client_optimizer)
    if device_type == "cpu":
        found += on_a_cpu(asked)
    return found


def _of_optimizer(
    config: Mapping[str, Any], device_type: str, can_build: Callable[[str], bool]
) -> Iterator[Limit]:
    name = section(config, "optimizer").get("type")
    if not isinstance(name, str):
        return
    if name.lower() in ("muadam", "muadamw", "musgd") and importlib.util.find_spec("mup") is None:
        yield Limit(
            "optimizer.type", name, "the package mup is not installed", None, "Install it: pip install mup."
        )
    op = op_of_optimizer(config)
    if op is None or can_build(op):
        return
    where = "the CPU" if device_type == "cpu" else device_type.upper()
    why = f"DeepSpeed's {name} needs its op {op}, which is not built and cannot be built here for {where}"
    remedy = _how_to_build(op, device_type)
    if name.lower() not in ("adam", "adamw"):
        advice = f"{remedy or 'Choose another type'}, or let configure_optimizers return the optimizer."
        yield Limit("optimizer.type", name, why, None, advice)
        return
    params = section(config, "optimizer", "params")
    extra = [key for key in _NOT_OF_TORCH_ADAM if key in params]
    advice = f"{remedy}, or write true, for PyTorch's optimizer of the same name"
    advice += f", without {' and '.join(extra)}, which it does not take." if extra else "."
    yield Limit(
        "optimizer.params.torch_adam",
        params.get("torch_adam", False),
        why,
        None if extra else True,
        advice,
        also={_RATIO: 1.0} if _is_partly_offloaded(config) else {},
    )


def _how_to_build(op: str, device_type: str) -> str:
    if device_type != "cpu":
        return "Install CUDA's toolkit, a C++ compiler and ninja"
    return "Install a C++ compiler and ninja" if op in _CPU_OPS else ""


def _of_client_optimizer(config: Mapping[str, Any], optimizer: type) -> Iterator[Limit]:
    forces = config.get("zero_force_ds_cpu_optimizer", True)
    if "optimizer" in config or not forces or not is_offloaded(config):
        return
    if _OF_DEEPSPEED.isdisjoint(cls.__name__ for cls in optimizer.__mro__):
        yield Limit(
            "zero_force_ds_cpu_optimizer",
            forces,
            f"with offload_optimizer DeepSpeed takes no {optimizer.__name__} unless this is false, as its own CPU"
            " optimizers are faster",
            False,
            "Write false, or return deepspeed.ops.adam.DeepSpeedCPUAdam from configure_optimizers.",
        )


def _of_ratio(config: Mapping[str, Any], client_optimizer: type | None) -> Iterator[Limit]:
    if not _is_partly_offloaded(config):
        return
    if stage_of(config) != 3:
        why = "DeepSpeed offloads a part of the optimizer's state in stage 3 only"
        advice = "Write 1.0, or leave it out, for all of it."
    elif is_offloaded(config) and not _may_be_cpu_adam(config, client_optimizer):
        why = "DeepSpeed offloads a part of the optimizer's state only with its own Adam for the CPU"
        advice = (
            "Write 1.0, or leave it out, for all of it; or choose optimizer.type: 'AdamW' without torch_adam, or return"
            " deepspeed.ops.adam.DeepSpeedCPUAdam from configure_optimizers."
        )
    else:
        return
    yield Limit(_RATIO, _ratio(config), why, 1.0, advice)


def _is_partly_offloaded(config: Mapping[str, Any]) -> bool:
    ratio = _ratio(config)
    return is_number(ratio) and ratio < 1


def _ratio(config: Mapping[str, Any]) -> object:
    return section(config, "zero_optimization", "offload_optimizer").get("ratio")


def _may_be_cpu_adam(config: Mapping[str, Any], client_optimizer: type | None) -> bool:
    if "optimizer" in config:
        kind = str(section(config, "optimizer").get("type")).lower()
        return kind != "muon" and op_of_optimizer(config) == "cpu_adam"
    return client_optimizer is None or client_optimizer.__name__ == "DeepSpeedCPUAdam"


def _of_nvme(config: Mapping[str, Any], can_build: Callable[[str], bool]) -> Iterator[Limit]:
    sections = sections_on_nvme(config)
    if sections and not can_build("async_io"):
        for name in sections:
            yield Limit(
                f"zero_optimization.{name}.device",
                "nvme",
                "DeepSpeed's op async_io, which needs the library aio (libaio-dev) and a C++ compiler, is not built and"
                " cannot be built here",
                "cpu",
                "Install both, or write 'cpu'.",
            )
