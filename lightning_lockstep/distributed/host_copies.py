"""Tensors that travel between hosts: copied to the CPU, sent as the bytes they are, and copied back.

For devices between which no process group of torch sends (XLA): what has to arrive exactly, and rarely. Gradients
go from device to device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities import apply_to_collection
from torch import Tensor

from lightning_lockstep.distributed.communicator import Communicator, ReduceOperation
from lightning_lockstep.distributed.uneven.gather_uneven import gather_uneven

__all__ = ["broadcast_object", "broadcast_tensors", "gather_tensor", "reduce_tensor"]


@dataclass(frozen=True)
class _OfDevice:
    """A tensor that was on a device, under way."""

    on_cpu: Tensor


def broadcast_object(
    communicator: Communicator,
    obj: Any,  # ignored on other ranks
    source: int,
    device: torch.device,  # of this rank, for tensors that were on a device there
) -> Any:
    """Return the object of rank ``source`` on every rank."""

    def lift(tensor: Tensor) -> Any:
        return tensor if tensor.device.type == "cpu" else _OfDevice(tensor.detach().cpu())

    sent = apply_to_collection(obj, Tensor, lift) if communicator.rank == source else None
    received = communicator.broadcast(sent, source)
    return apply_to_collection(received, _OfDevice, lambda one: one.on_cpu.to(device))


def broadcast_tensors(tensors: Sequence[Tensor], source: int = 0) -> None:
    """Give tensors, of equal shapes and dtypes on all ranks, the values of rank ``source``, in place."""
    for tensor in tensors:
        row = tensor.detach().cpu().contiguous()
        if row.numel():
            dist.broadcast(row.view(-1).view(torch.uint8), source)  # bytes: whatever gloo knows of the dtype
            tensor.detach().copy_(row)


def gather_tensor(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensor of every rank, in rank order; sizes may differ: torchmetrics' ``dist_sync_fn``."""
    return [one.to(tensor.device) for one in gather_uneven(tensor.detach().cpu(), group=group)]


def reduce_tensor(communicator: Communicator, tensor: Tensor, op: ReduceOperation) -> Tensor:
    """Return a tensor reduced over all ranks, on its device; 16 bits and means of integers in float32."""
    value = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    of_16_bits = value.is_floating_point() and value.itemsize < 4
    if of_16_bits or value.dtype is torch.bool or (op == "mean" and not value.is_floating_point()):
        value = value.float() if value.dtype is not torch.bool or op == "mean" else value.int()
    reduced = communicator.all_reduce(value, op)
    return reduced.to(tensor.device, tensor.dtype if of_16_bits else None)
