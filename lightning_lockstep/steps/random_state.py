"""The state of every random number generator that a training step may draw from."""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomState"]


@dataclass
class RandomState:
    """State of the generators of torch (CPU and CUDA), Python and numpy."""

    torch_cpu: Tensor
    torch_cuda: dict[int, Tensor]  # by index of the device
    python: Any
    numpy: Any  # of the global generator; None: numpy is not in use

    @classmethod
    def capture(cls, device: torch.device | None = None) -> RandomState:
        """Take the states, of CUDA that of ``device`` or all in use; nothing is read from a device."""
        return cls(torch.get_rng_state(), _cuda_states(device), random.getstate(), _numpy_state())

    def restore(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        for index, state in self.torch_cuda.items():
            torch.cuda.set_rng_state(state, index)
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy.forget()
            sys.modules["numpy"].random.set_state(self.numpy)


def _cuda_states(device: torch.device | None) -> dict[int, Tensor]:
    # The state of a CUDA generator lives on the host: a seed and an offset.
    if device is not None and device.type != "cuda":
        return {}
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return {}
    if device is not None:
        index = torch.cuda.current_device() if device.index is None else device.index
        return {index: torch.cuda.get_rng_state(index)}
    return dict(enumerate(torch.cuda.get_rng_state_all()))


class _NumpyState:
    """State of numpy's global generator, asked for only when it has moved: that takes longer than all else here.

    Its Mersenne Twister is compared through numpy's ctypes interface. Normal numbers come in pairs, and the one
    left over is not part of it: while there is one, the state is asked for each time.
    """

    _SIZE = 624 * 4 + 4  # the numbers of the Mersenne Twister and its position in them [bytes]

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory = (ctypes.c_char * self._SIZE)()
        self._bytes = b""
        self._state: Any = None

    def forget(self) -> None:
        """Ask for the state the next time, moved or not."""
        self._state = None

    def __call__(self, numpy: Any) -> Any:
        generator = numpy.random.get_bit_generator()
        if not isinstance(generator, numpy.random.MT19937):
            return numpy.random.get_state(legacy=False)
        if generator is not self._generator:
            self._generator, self._state = generator, None
            self._memory = (ctypes.c_char * self._SIZE).from_address(generator.ctypes.state_address)
        now = self._memory.raw
        if self._state is None or self._state["has_gauss"] or now != self._bytes:
            self._bytes, self._state = now, numpy.random.get_state(legacy=False)
        return self._state


_numpy = _NumpyState()


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else _numpy(numpy)
