"""Values of tensors, stored where they do not take the memory that is measured or has run out."""

from __future__ import annotations

import tempfile
import weakref

import torch
from torch import Tensor

__all__ = ["StoredCopies"]


class StoredCopies:
    """Values of tensors, in host memory for those of a device, in a file for the others."""

    def __init__(self, tensors: list[Tensor]) -> None:
        # It lives as long as this object; the system deletes it when it is closed.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        torch.save([t.detach() for t in tensors if t.device.type == "cpu"], self._file)
        self._copies = [t.detach().cpu() for t in tensors if t.device.type != "cpu"]

    def write_to(self, tensors: list[Tensor]) -> None:
        """Write the values into the tensors, or into others of their shapes and devices."""
        self._file.seek(0)
        stored = iter(torch.load(self._file, weights_only=True))
        copies = iter(self._copies)
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(next(stored) if tensor.device.type == "cpu" else next(copies))
