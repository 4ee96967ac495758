"""The device that tests and benchmarks train on: the CPU, or a GPU (``--device cuda``), which two ranks may share."""

from __future__ import annotations

import os
from typing import Any

#: The environment variable that says so, which ranks and programs get with their environment.
DEVICE = "LOCKSTEP_TESTS_DEVICE"


def chosen_device() -> str:
    """``cpu`` or ``cuda``."""
    return os.environ.get(DEVICE, "cpu")


def on_device(ranks: int = 1) -> dict[str, Any]:
    """Return the accelerator and the devices that a Trainer of this many ranks is given."""
    if chosen_device() == "cpu":
        return {"accelerator": "cpu", "devices": ranks}
    import torch

    if torch.cuda.device_count() >= ranks:
        return {"accelerator": "cuda", "devices": ranks}
    # nccl refuses two ranks on one card; gloo takes tensors of it.
    torch.distributed.Backend.default_device_backend_map["cuda"] = "gloo"
    return {"accelerator": _shared_card(), "devices": ranks}


def _shared_card() -> Any:
    """Return Lightning's accelerator for CUDA, which gives every rank the first card."""
    import torch
    from lightning.pytorch.accelerators import CUDAAccelerator

    class SharedCard(CUDAAccelerator):
        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            return [0] * int(devices)

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("cuda", index) for index in devices]

    return SharedCard()


def wait_for_device() -> None:
    """Wait until the card has done what it was told, so that a clock that is read next counts all of it."""
    if chosen_device() == "cuda":
        import torch

        torch.cuda.synchronize()


def leave_memory(size: int) -> None:
    """Let this process allocate ``size`` bytes more on the card; an allocation beyond that really fails."""
    import torch

    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + size) / total))
