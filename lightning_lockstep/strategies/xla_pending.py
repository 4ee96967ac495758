"""What a strategy for XLA devices says of operations that are called and not run yet; for every such strategy."""

from __future__ import annotations

import torch

from lightning_lockstep.steps.capabilities import Capabilities
from lightning_lockstep.xla.runtime import XLARuntime

__all__ = ["CAPABILITIES", "XLAPending"]

CAPABILITIES = Capabilities(sees_out_of_memory=False, runs_at_once=False)
"""Of a training step that torch-xla compiles."""


class XLAPending:
    """How to wait for what torch-xla has collected, and whose memory it takes.

    Ranks: any rank, alone; nothing is sent but what the collected operations send.
    """

    runtime: XLARuntime | None = None
    _device = torch.device("cpu")

    @property
    def memory_device(self) -> torch.device:
        """The device whose memory fills up: the CPU where the devices are virtual ones on it."""
        virtual = self.runtime is None or self.runtime.device_type == "CPU"
        return torch.device("cpu") if virtual else self._device

    def finish_pending(self) -> None:
        """Run what was called and is pending, and wait until the devices are through.

        Raises:
            RuntimeError: Memory ran out, or what else went wrong there.
        """
        if self.runtime is not None:
            self.runtime.finish()

    def device_seed(self) -> int:
        """Return the state of the devices' random numbers; nothing is read from a device."""
        return 0 if self.runtime is None else self.runtime.seed()

    def set_device_seed(self, seed: int) -> None:
        """Let the devices' random numbers go on from a state.

        Args:
            seed: What :meth:`device_seed` has returned.
        """
        if self.runtime is not None:
            self.runtime.set_seed(seed)
