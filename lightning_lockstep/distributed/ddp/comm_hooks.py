"""Gradient compression hooks of DistributedDataParallel, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

__all__ = ["HOOKS", "compression_hook"]

HOOKS = ("fp16_compress", "bf16_compress", "power_sgd")


def compression_hook(
    hook: str | Callable[..., Any] | None, state: object | None
) -> tuple[Callable[..., Any] | None, object | None]:
    """Return (hook, state) for a gradient compression hook given by name or as a function.

    Source: https://pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    if hook == "fp16_compress":
        return default_hooks.fp16_compress_hook, state
    if hook == "bf16_compress":
        # Torch refuses its own function by its name without NCCL, though gloo reduces bfloat16 as well.
        return lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket), state
    if hook == "power_sgd":
        made = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1)
        return powerSGD_hook.powerSGD_hook, state or made
    return hook, state  # type: ignore[return-value]
