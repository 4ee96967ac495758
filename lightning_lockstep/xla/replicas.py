"""The devices of one process as a mesh, and those of several processes as replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.xla.runtime import XLARuntime, find_device_type

# -- The devices of one process as a mesh: how batches and parameters are divided among them --
# What a tensor holds never depends on how it is divided, only where its parts lie and which device computes what.

_AXIS = "data"


class DeviceMesh:
    """All devices, in a row, once SPMD is chosen."""

    def __init__(self, runtime: XLARuntime) -> None:
        self._spmd = runtime.module("distributed.spmd")
        self.size = runtime.num_devices
        self._mesh = self._spmd.Mesh(np.arange(self.size), (self.size,), (_AXIS,))

    def divide_batch(self, batch: Any) -> Any:
        # If that is not a multiple of the number of devices, the last ones have less to do; torch-xla keeps
        # what they compute beyond it out of every result.
        return apply_to_collection(batch, Tensor, self._divide_first)

    def _divide_first(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "xla" and tensor.dim():
            self._mark(tensor, 0)
        return tensor

    def divide_parameters(
        self,
        module: torch.nn.Module,
        *,
        min_size: int,  # [values]; smaller ones stay whole on each device
        patterns: Sequence[str],  # names, with * and ?, that are divided whatever their size
    ) -> dict[str, int]:  # the dimension of each that was divided
        """Divide parameters among the devices, each along its longest dimension that divides evenly."""
        divided = {}
        for name, parameter in module.named_parameters():
            wanted = parameter.numel() >= min_size or any(fnmatchcase(name, one) for one in patterns)
            even = [number for number, size in enumerate(parameter.shape) if size and size % self.size == 0]
            if wanted and even:
                divided[name] = max(even, key=parameter.size)
                self._mark(parameter, divided[name])
        return divided

    def divide_states(self, module: torch.nn.Module, optimizer: Any, divided: Mapping[str, int]) -> None:
        """Divide what an optimizer has of its parameters as those are, after it was loaded."""
        for name, parameter in module.named_parameters():
            for value in optimizer.state.get(parameter, {}).values():
                if name in divided and isinstance(value, Tensor) and value.shape == parameter.shape:
                    self._mark(value, divided[name])

    def _mark(self, tensor: Tensor, dimension: int) -> None:
        partition = tuple(_AXIS if one == dimension else None for one in range(tensor.dim()))
        self._spmd.mark_sharding(tensor, self._mesh, partition)


# -- The devices of several processes as replicas of one program, and the collectives between them --
# Each process has one device. torch-xla puts what is called here into the compiled step, so that nothing
# waits in Python.


def check_replicas(count: int) -> None:
    # On the CPU each process has its own client, and an all-reduce waits for devices of the same client only.
    if count > 1 and find_device_type() == "CPU":
        raise ConfigurationError(
            f"strategy='lockstep_xla' with {count} devices: expected 1, because torch-xla's devices on the CPU cannot"
            " reduce between processes. Use strategy='lockstep_xla_spmd' for several virtual devices in one process, or"
            " strategy='lockstep_ddp' for several CPU processes without torch-xla."
        )


class Replicas:
    """This process's device among those of all ranks, which make it together."""

    def __init__(self, runtime: XLARuntime, communicator: Communicator) -> None:
        self._runtime, self._communicator = runtime, communicator
        found = communicator.gather(runtime.place())
        self._ordinals = [ordinal for ordinal, _, _ in found]
        size = communicator.world_size
        if sorted(self._ordinals) != list(range(size)) or any(one[1:] != (size, 1) for one in found):
            raise LaunchError(
                f"{size} ranks, and torch-xla sees (ordinal, replicas, devices of the process) {found} by rank:"
                f" expected each ordinal once, {size} replicas and one device in each process. Give the Trainer all"
                " devices of each host; if a chip has two (TPU v2, v3, v7), use strategy='lockstep_xla_spmd'."
            )

    def average_gradients(self, module: torch.nn.Module) -> None:
        # A parameter that only some ranks have used counts as zero on the others; without any it has no gradient.
        parameters = [one for one in module.parameters() if one.requires_grad]
        if not parameters:
            return
        # A byte each, between hosts; it also shows the guard who has not arrived.
        used = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8)
        gradients = []
        used = self._communicator.all_reduce(used, "max")
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        if gradients:
            self._runtime.all_reduce(gradients, scale=1.0 / self._communicator.world_size)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks in rank order, of shape (ranks, ...); gradients go back to every rank."""
        return _Gather.apply(tensor, self)  # type: ignore[no-untyped-call, no-any-return]


class _Gather(torch.autograd.Function):
    """A gather whose gradients go back to the ranks that have given the parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, replicas: Replicas) -> Tensor:
        ctx.replicas = replicas
        found = replicas._runtime.all_gather(tensor.unsqueeze(0))
        if replicas._ordinals == sorted(replicas._ordinals):
            return found
        return found[torch.tensor(replicas._ordinals, device=found.device)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone()
        ctx.replicas._runtime.all_reduce([summed])
        return summed[ctx.replicas._communicator.rank], None
