"""What holds for every strategy of XLA devices, whose operations are called and run later."""

from __future__ import annotations

import torch

from lightning_lockstep.steps.capabilities import Capabilities
from lightning_lockstep.xla.runtime import XLARuntime

__all__ = ["CAPABILITIES", "XLAPending"]

CAPABILITIES = Capabilities(sees_out_of_memory=False, runs_at_once=False)
"""Of a training step that torch-xla compiles."""


class XLAPending:
    """The state of the devices' random numbers, which a step that is run again begins from."""

    runtime: XLARuntime | None = None
    _device = torch.device("cpu")

    def device_seed(self) -> int:
        """Return the state of the devices' random numbers; nothing is read from a device."""
        return 0 if self.runtime is None else self.runtime.seed()

    def set_device_seed(self, seed: int) -> None:
        """Let the devices' random numbers go on from a state."""
        if self.runtime is not None:
            self.runtime.set_seed(seed)
