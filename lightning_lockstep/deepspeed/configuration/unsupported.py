"""Keys of a config that DeepSpeed cannot serve, whatever is installed: on any device, and on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_lockstep._settings import is_whole
from lightning_lockstep.deepspeed.configuration.adapting import Limit
from lightning_lockstep.deepspeed.configuration.ops import QUANTIZING
from lightning_lockstep.deepspeed.configuration.reading import section, stage_of
from lightning_lockstep.deepspeed.precision import cpu_has_float16

__all__ = ["on_a_cpu", "on_any_device"]

_FLOAT16 = ("fp16", "float16", "half", "torch.float16", "torch.half")


def on_any_device(config: Mapping[str, Any]) -> Iterator[Limit]:  # in today's spelling
    """Yield what does not work under Lightning, or not at all."""
    yield from _of_deepspeeds_own_loop(config)
    writer = section(config, "checkpoint").get("writer")
    if writer is not None:
        yield Limit(
            "checkpoint.writer",
            writer,
            "DeepSpeed's writers need environment variables (CROSS_SIZE) that only its own program for starting ranks"
            " sets, and one in a process of its own may still write when the folder counts as whole",
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
    if autocast.get("enabled") is True and _is_float16(autocast.get("dtype")) and stage_of(config) > 0:
        yield Limit(
            "torch_autocast.dtype",
            autocast["dtype"],
            "in float16 with ZeRO nothing lowers DeepSpeed's loss scale when gradients overflow, and no step is done"
            " from then on",
            "bfloat16",
            "Write 'bfloat16', or leave torch_autocast out and write fp16.enabled: true.",
        )


def _of_deepspeeds_own_loop(config: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield what only works where DeepSpeed's own loop, loader or model calls it."""
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


def on_a_cpu(config: Mapping[str, Any]) -> Iterator[Limit]:  # in today's spelling
    """Yield what fails on a CPU with any build."""
    yield from _of_float16(config)
    yield from _only_cuda(config)


def _is_float16(dtype: object) -> bool:
    return str(dtype).lower() in _FLOAT16


def _of_float16(config: Mapping[str, Any]) -> Iterator[Limit]:
    enabled = section(config, "fp16").get("enabled")
    if enabled is True and not cpu_has_float16():
        yield Limit(
            "fp16.enabled",
            enabled,
            "this CPU has no arithmetic of 16 bits that PyTorch could use for fp16",
            False,
            "Write bf16.enabled: true, which every CPU has, or precision='32-true'.",
            also={"bf16.enabled": True},
        )


def _not_on_cpu(name: str, why: str) -> Limit:
    return Limit(name, True, why, False, "Write false, or leave it out.")


def _only_cuda(config: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield what fails on a CPU with any build.

    Not listed is what works there, if only for show: pinned memory, ``overlap_comm``, ``communication_data_type``,
    ``zero_hpz_partition_size``, and quantizing below stage 3.
    """
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
