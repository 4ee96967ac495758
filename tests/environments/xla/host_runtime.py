"""A stand-in for the collectives between TPUs, so that two ranks can be tried without one.

Each rank has a PJRT client with one device of the CPU, as a rank of a TPU host has its chip. What torch-xla would send
between the devices is copied to the hosts and goes over gloo. All else is the real thing. Ordinals run against ranks,
as they may on TPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.strategies import xla
from lightning_lockstep.xla.runtime import XLARuntime


class HostRuntime(XLARuntime):
    """torch-xla, with collectives between the hosts of this program's ranks."""

    def be_process(self, local_rank: int, local_processes: int) -> None:
        super().be_process(0, 1)

    def place(self) -> tuple[int, int, int]:
        ranks = dist.get_world_size()
        return ranks - 1 - dist.get_rank(), ranks, 1

    def all_reduce(self, tensors: list[Tensor], *, scale: float = 1.0) -> None:
        for tensor in tensors:
            on_cpu = tensor.cpu()
            dist.all_reduce(on_cpu)
            tensor.copy_(on_cpu * scale)

    def all_gather(self, tensor: Tensor) -> Tensor:
        on_cpu = tensor.cpu()
        everyone = [torch.empty_like(on_cpu) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, on_cpu)
        return torch.cat(everyone[::-1]).to(tensor.device)


def use_host_runtime() -> None:
    """Let ``LockstepXLAStrategy`` take several ranks on the CPU in this process."""
    changed: Any = xla
    changed.XLARuntime = HostRuntime
    changed.check_replicas = lambda count: None
