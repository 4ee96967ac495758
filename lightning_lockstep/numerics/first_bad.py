"""Which of many steps was the first with a bad value, noted on the device and read now and then.

For devices whose operations are collected and compiled: a flag that is read in each step would stop each step. Here
the step itself compares and keeps the number of the first bad one, so that nothing is compiled but the step, and one
small tensor is read for many of them.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

__all__ = ["FirstBad", "bad_flag"]


def bad_flag(tensor: Tensor, *, allow_inf: bool = False) -> Tensor:
    """Return whether a tensor holds a nan or an infinity, as a tensor on its device; nothing is read."""
    values = tensor.detach()
    return values.isnan().any() if allow_inf else values.isfinite().all().logical_not()


class FirstBad:
    """The first of the steps noted since :meth:`forget` in which something was bad."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Start again at step 0."""
        # Copied to the device rather than made there: a constant would be compiled into the first step.
        self.noted = 0
        self._count, self._common, self._here = (
            torch.tensor(value, dtype=torch.int32).to(self._device) for value in (0, -1, -1)
        )
        self._answer: Tensor | None = None
        self._flags: dict[Hashable, Tensor] = {}

    @property
    def found(self) -> Tensor:
        """Whether a step that all ranks know to be bad has been noted, as a tensor on the device."""
        return self._common >= 0

    def note(
        self,
        key: Hashable,  # what the flags are of; steps of one key have as many
        flags: Tensor,  # bool of shape (flags,), of this rank
        *,
        common: Tensor,  # bool without dimensions; bad in a way that all ranks see alike
    ) -> int:
        """Note a step, and return its number."""
        with torch.no_grad():
            before = self._flags.get(key)
            if before is None:
                before = torch.zeros(flags.shape, dtype=torch.bool).to(self._device)
            first = (self._here < 0) & flags.any()
            self._flags[key] = torch.where(first, flags, before)
            self._here = torch.where(first, self._count, self._here)
            self._common = torch.where((self._common < 0) & common, self._count, self._common)
            self._count = self._count + 1
            self._answer = torch.stack([self._common, self._here])
        self.noted += 1
        return self.noted - 1

    def read(self) -> tuple[int | None, int | None]:
        """Return the first step that all ranks know to be bad, and the first that this rank knows to be bad.

        Waits for the last step noted; reads 8 bytes from the device.
        """
        if self._answer is None:
            return None, None
        common, here = self._answer.tolist()
        return (None if common < 0 else common), (None if here < 0 else here)

    def flags_of(self, key: Hashable) -> list[bool]:
        """Return the flags of the first bad step on this rank, whose key this is."""
        return [bool(flag) for flag in self._flags[key].tolist()]
