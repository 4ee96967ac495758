"""Lightning's accelerator for XLA devices on the CPU."""

from __future__ import annotations

import torch

from lightning_lockstep._lightning import CPUAccelerator

__all__ = ["XLADevices"]


class XLADevices(CPUAccelerator):
    """Virtual XLA devices on the CPU, which Lightning's accelerator for XLA takes for no devices."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: torch-xla has the devices."""
