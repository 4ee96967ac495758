"""DeepSpeed's activation checkpointing, set as the configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["configure_activation_checkpointing"]


def configure_activation_checkpointing(config: Mapping[str, Any]) -> None:
    """Set what ``deepspeed.checkpointing.checkpoint`` does, which it keeps in global variables.

    Lightning's own hands over neither the number of checkpoints, without which contiguous memory is refused, nor
    whether the device is waited for; and it leaves what another fit of this process has set.
    """
    import deepspeed

    section = config.get("activation_checkpointing") or {}
    deepspeed.checkpointing.configure(
        mpu_=None,
        partition_activations=section.get("partition_activations"),
        contiguous_checkpointing=section.get("contiguous_memory_optimization"),
        num_checkpoints=section.get("number_checkpoints"),
        checkpoint_in_cpu=section.get("cpu_checkpointing"),
        synchronize=section.get("synchronize_checkpoint_boundary"),
        profile=section.get("profile"),
    )
