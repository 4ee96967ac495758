"""The devices of one process as a mesh: how batches and parameters are divided among them.

What a tensor holds never depends on how it is divided, only where its parts lie and which device computes what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from lightning_lockstep.xla.runtime import XLARuntime

__all__ = ["DeviceMesh"]

_AXIS = "data"


class DeviceMesh:
    """All devices, in a row, once SPMD is chosen."""

    def __init__(self, runtime: XLARuntime) -> None:
        self._spmd = runtime.spmd()
        self.size = runtime.num_devices
        self._mesh = self._spmd.Mesh(np.arange(self.size), (self.size,), (_AXIS,))

    def divide_batch(self, batch: Any) -> Any:
        """Divide the tensors of a batch along their first dimension.

        Where that is no multiple of the number of devices, the last ones have less to do; torch-xla keeps what they
        compute beyond it out of every result.
        """
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
            dimension = _longest_even(parameter.shape, self.size)
            if wanted and dimension is not None:
                self._mark(parameter, dimension)
                divided[name] = dimension
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


def _longest_even(shape: Sequence[int], parts: int) -> int | None:
    even = [dimension for dimension, size in enumerate(shape) if size and size % parts == 0]
    return max(even, key=lambda dimension: shape[dimension], default=None)
