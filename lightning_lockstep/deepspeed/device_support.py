"""What DeepSpeed cannot do on this device, and what is refused or replaced."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_lockstep._doors.deepspeed_internals import (
    is_compatible,
    is_installed,
    make_op_builder,
    op_name,
)
from lightning_lockstep._doors.torch_internals import cpu_has_float16
from lightning_lockstep._settings import is_number, is_whole
from lightning_lockstep.deepspeed.build_tools import OPS, missing_tools
from lightning_lockstep.deepspeed.config import modern_spelling, section, stage_of
from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.errors import ConfigurationError

# -- What a config asks for that DeepSpeed cannot do: refused by name, or replaced by what it can --


@dataclass(frozen=True)
class Limit:
    """A key of a config that asks for what DeepSpeed cannot do on a device."""

    path: str  # of the key, such as fp16.enabled
    given: Any
    why: str  # DeepSpeed cannot do it here, as a clause
    instead: Any  # value that does the same, or nearly; None: there is none
    advice: str  # what a user can write, as sentences
    also: Mapping[str, Any] = field(default_factory=dict)  # other keys that the replacement sets, by path

    @property
    def changes(self) -> dict[str, Any]:
        """What the replacement sets, by path."""
        return {self.path: self.instead, **self.also}

    @property
    def written(self) -> str:
        """The replacement in words."""
        return " and ".join(f"{path}={value!r}" for path, value in self.changes.items())

    def refusal(self, adapt: bool) -> str:
        """Return the error, with the option that would replace the key."""
        text = f"{self.path}={self.given!r}: {self.why}. {self.advice}"
        if not adapt and self.instead is not None:
            text += f" adapt=True of the strategy writes {self.written}."
        return text


def refuse_or_adapt(
    config: Mapping[str, Any], limits: list[Limit], adapt: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the config without what cannot be done, and a line of text for each replacement."""
    refused = [limit for limit in limits if not adapt or limit.instead is None]
    if refused:
        raise ConfigurationError([limit.refusal(adapt) for limit in refused])
    adapted = modern_spelling(config)
    for limit in limits:
        for path, value in limit.changes.items():
            _set(adapted, path, value)
    return adapted, [f"{one.written} instead of {one.path}={one.given!r}: {one.why}." for one in limits]


def _set(config: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for name in sections:
        inner = config.get(name)
        config[name] = config = inner if isinstance(inner, dict) else {}
    config[key] = value


# -- The ops of DeepSpeed that a config needs, which are compiled, and whether they can be had here --

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
    if device_type == "cuda":
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            return False
    return not missing_tools([op]) and is_compatible(builder)


# Types of DeepSpeed's optimizers, with the ops that they need on the device, and where they are offloaded.
_OPS_OF_OPTIMIZERS = {
    "adagrad": (None, "cpu_adagrad"),
    "adam": ("fused_adam", "cpu_adam"),
    "adamw": ("fused_adam", "cpu_adam"),
    "lamb": ("fused_lamb", "fused_lamb"),
    "lion": ("fused_lion", "cpu_lion"),
    "muon": (None, "cpu_adam"),
}


def op_of_optimizer(config: Mapping[str, Any]) -> str | None:  # in today's spelling
    """Return the op without which the optimizer of a config cannot be made."""
    kind = str(section(config, "optimizer").get("type", "")).lower()
    if kind in ("adam", "adamw", "muon") and section(config, "optimizer", "params").get("torch_adam") is True:
        return None
    on_device, offloaded = _OPS_OF_OPTIMIZERS.get(kind, (None, None))
    return offloaded if is_offloaded(config) else on_device


def sections_on_nvme(config: Mapping[str, Any]) -> list[str]:  # in today's spelling
    """Return the names of the sections of ZeRO whose device is NVMe."""
    zero = section(config, "zero_optimization")
    return [
        name for name in ("offload_optimizer", "offload_param") if section(zero, name).get("device") == "nvme"
    ]


def is_offloaded(config: Mapping[str, Any]) -> bool:  # in today's spelling
    """Return whether the optimizer states of a config are kept off the device."""
    return section(config, "zero_optimization", "offload_optimizer").get("device") in _OFFLOADED


# -- Keys of a config that DeepSpeed cannot serve, whatever is installed: on any device, and on a CPU --

_FLOAT16 = ("fp16", "float16", "half", "torch.float16", "torch.half")


def _of_deepspeeds_loop(config: Mapping[str, Any]) -> Iterator[Limit]:  # in today's spelling
    """Yield what works only where DeepSpeed's own loop, loader or model calls it."""
    if config.get("managed_gradient_accumulation") is False:
        yield Limit(
            "managed_gradient_accumulation",
            False,
            "the engine would step after every batch, also where batches are accumulated",
            True,
            "Write true, or leave it out: Lightning's loop tells the engine when to step.",
        )
    if section(config, "compile").get("deepcompile") is True:
        yield Limit(
            "compile.deepcompile",
            True,
            "DeepCompile begins with engine.compile(), which Lightning does not call",
            False,
            "Write false, or leave it out, and call torch.compile in configure_model.",
        )
    if section(config, "data_efficiency", "data_sampling").get("enabled") is True:
        yield Limit(
            "data_efficiency.data_sampling.enabled",
            True,
            "DeepSpeed chooses the samples in its own loader, and Lightning's is used",
            False,
            "Write false, and choose the samples in a sampler of the training loader.",
        )
    if section(config, "pipeline"):
        yield Limit(
            "pipeline",
            config["pipeline"],
            "DeepSpeed divides only its own PipelineModule in stages, which Lightning cannot train",
            None,
            "Remove the section.",
        )
    for path, size in (
        ("tensor_parallel.autotp_size", section(config, "tensor_parallel").get("autotp_size")),
        ("sequence_parallel_size", config.get("sequence_parallel_size")),
    ):
        if is_whole(size) and size > 1:
            yield Limit(
                path,
                size,
                "several ranks would need the same batch, and Lightning gives each rank its own",
                None,
                "Write 1, or leave it out; ZeRO's stage 3 divides a model that is too large for one device.",
            )


def _on_any_device(config: Mapping[str, Any]) -> Iterator[Limit]:  # in today's spelling
    """Yield what does not work under Lightning, or not at all."""
    writer = section(config, "checkpoint").get("writer")
    if writer is not None:
        yield Limit(
            "checkpoint.writer",
            writer,
            "DeepSpeed's writers need environment variables (CROSS_SIZE) that only its own program for starting ranks"
            " sets, and one in a separate process may still write when the folder counts as whole",
            None,
            "Remove the section: torch writes the checkpoints. If they take too long, write fewer of them, with"
            " every_n_train_steps of ModelCheckpoint.",
        )
    activations = section(config, "activation_checkpointing")
    needed = ("partition_activations", "number_checkpoints")
    if activations.get("contiguous_memory_optimization") is True and not all(map(activations.get, needed)):
        yield Limit(
            "activation_checkpointing.contiguous_memory_optimization",
            True,
            "DeepSpeed takes it only with partition_activations and number_checkpoints",
            False,
            "Write both, the latter with the number of calls of deepspeed.checkpointing.checkpoint in a forward pass,"
            " or write false.",
        )
    autocast = section(config, "torch_autocast")
    is_float16 = str(autocast.get("dtype")).lower() in _FLOAT16
    if autocast.get("enabled") is True and is_float16 and stage_of(config) > 0:
        yield Limit(
            "torch_autocast.dtype",
            autocast["dtype"],
            "in float16 with ZeRO nothing lowers DeepSpeed's loss scale when gradients overflow, and no step is done"
            " from then on",
            "bfloat16",
            "Write 'bfloat16', or leave torch_autocast out and write fp16.enabled: true.",
        )


def _not_on_cpu(name: str, why: str) -> Limit:
    return Limit(name, True, why, False, "Write false, or leave it out.")


def _on_a_cpu(config: Mapping[str, Any]) -> Iterator[Limit]:  # in today's spelling
    """Yield what fails on a CPU with any build."""
    # Not listed is what works there, if only for show: pinned memory, ``overlap_comm``,
    # ``communication_data_type``, ``zero_hpz_partition_size``, and quantizing below stage 3.
    if section(config, "fp16").get("enabled") is True and not cpu_has_float16():
        yield Limit(
            "fp16.enabled",
            True,
            "this CPU has no arithmetic of 16 bits that PyTorch could use for fp16",
            False,
            "Write bf16.enabled: true, which every CPU has, or precision='32-true'.",
            also={"bf16.enabled": True},
        )
    zero = section(config, "zero_optimization")
    for name in QUANTIZING:
        if zero.get(name) is True and stage_of(config) == 3:
            yield _not_on_cpu(
                f"zero_optimization.{name}",
                "DeepSpeed's op that quantizes weights and gradients is written for CUDA",
            )
    if zero.get("zenflow") is not None:
        yield Limit(
            "zero_optimization.zenflow",
            zero["zenflow"],
            "ZenFlow is written for CUDA: on a CPU stage 3 fails, and stage 2 fails or trains with nan",
            None,
            "Remove the section.",
        )
    if section(zero, "offload_optimizer").get("super_offload") is True and stage_of(config) == 3:
        yield _not_on_cpu(
            "zero_optimization.offload_optimizer.super_offload", "SuperOffload is written for CUDA"
        )
    activations = section(config, "activation_checkpointing")
    if activations.get("cpu_checkpointing") is True and activations.get("partition_activations") is not True:
        yield _not_on_cpu(
            "activation_checkpointing.cpu_checkpointing",
            "on a CPU the activations are in the memory of the host anyway, and DeepSpeed loses them when it moves them"
            " there",
        )
    if section(config, "aio").get("use_gds") is True:
        yield _not_on_cpu("aio.use_gds", "GPUDirect Storage is between a drive and a CUDA device")


# -- What a config asks of DeepSpeed that it cannot do on this device here, and what can be put in its place
# DeepSpeed finds out on every rank, when it makes the engine or later, and mostly by an assertion. What
# stands here was tried with DeepSpeed 0.19.8 on two ranks; ``tests/variants/deepspeed/test_device_support.py`` tries
# it again.

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
        *_of_deepspeeds_loop(asked),
        *_on_any_device(asked),
        *_of_optimizer(asked, device_type, can_build),
        *_of_nvme(asked, can_build),
        *_of_ratio(asked, client_optimizer),
    ]
    if client_optimizer is not None:
        found += _of_client_optimizer(asked, client_optimizer)
    if device_type == "cpu":
        found += _on_a_cpu(asked)
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
