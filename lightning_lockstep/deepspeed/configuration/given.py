"""What the Trainer under construction was given, before anything of a run is known."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_lockstep._lightning.internals import given_to_trainer
from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed.configuration.trainer_values import TrainerValues
from lightning_lockstep.numerics.precision import requested_precision

__all__ = ["check_devices", "device_type_given", "values_given"]


def values_given() -> TrainerValues:
    """Return what the Trainer under construction was given; ``None`` for what it was not.

    An accumulation of 1, the default, counts as not given: a program such as ours gives the Trainer all its defaults.
    """
    algorithm = given_to_trainer("gradient_clip_algorithm")
    accumulation = given_to_trainer("accumulate_grad_batches")
    return TrainerValues(
        precision=requested_precision(),
        accumulate_grad_batches=None if accumulation == 1 else accumulation,
        gradient_clip_val=given_to_trainer("gradient_clip_val"),
        gradient_clip_algorithm=None if algorithm is None else str(getattr(algorithm, "value", algorithm)),
        batch_size=None,
        world_size=None,
        total_steps=None,
        optimizer_defaults=None,
        hidden_size=None,
    )


def device_type_given() -> str | None:
    """Return the type of the devices that DeepSpeed is to be imported for, where that is known."""
    accelerator = given_to_trainer("accelerator")
    if accelerator == "cpu" or not torch.accelerator.is_available():
        return "cpu"
    return "cuda" if accelerator in ("gpu", "cuda") and torch.cuda.is_available() else None


def check_devices(devices: Sequence[torch.device], faults: Faults) -> None:
    """Note GPUs that DeepSpeed would take for others."""
    indices = [device.index for device in devices if device.type == "cuda"]
    faults.check(
        indices == list(range(len(indices))),
        "devices",
        indices,
        "the first GPUs in their order, since DeepSpeed takes the local rank for the index of the GPU: leave out"
        " those that are not to be used with CUDA_VISIBLE_DEVICES",
    )
