"""The state of every random number generator that a training step may draw from, taken for next to nothing."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomState"]

_HEADER = object.__basicsize__  # reference count and type
_NUMPY_BYTES = 2500  # 624 numbers and a position: all of the Mersenne Twister


@dataclass
class RandomState:
    """State of the generators of torch (CPU and the model's device), Python and numpy.

    Attributes:
        torch_cpu: Of torch on the CPU.
        device: The device of the model.
        torch_device: Of torch on that device; ``None`` on the CPU.
        python: Of ``random``.
        numpy: Of numpy's global generator; ``None`` where numpy is not in use.
    """

    torch_cpu: Tensor
    device: torch.device
    torch_device: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Take the states as they are; nothing is read from a device.

        Args:
            device: The device of the model.

        Ranks: any rank, alone.
        """
        # The state of a CUDA generator lives on the host: a seed and an offset.
        of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, of_device, _python_state(), _numpy_state())

    def restore(self) -> None:
        """Put every generator into the captured state.

        Ranks: any rank, alone.
        """
        torch.set_rng_state(self.torch_cpu)
        if self.torch_device is not None:
            torch.cuda.set_rng_state(self.torch_device, self.device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class _Watched:
    """A generator's state, asked for only when the memory that holds it has changed.

    Python and numpy take longer to hand their states out (625 number objects) than all else a step's record
    takes, and most steps draw from neither.

    Args:
        places: (address, size [bytes]) of all that the state consists of.
        ask: Gives the state.
        keep: What owns the memory.
    """

    def __init__(self, places: Sequence[tuple[int, int]], ask: Callable[[], Any], keep: Any) -> None:
        self._places, self._ask, self._keep = tuple(places), ask, keep
        self._memory: list[bytes] = []
        self._state: Any = None

    def state(self) -> Any:
        memory = [ctypes.string_at(address, size) for address, size in self._places]
        if memory != self._memory:
            self._memory, self._state = memory, self._ask()
        return self._state


_CPYTHON = sys.implementation.name == "cpython"
_watched: dict[str, _Watched] = {}


def _python_state() -> Any:
    generator = getattr(random, "_inst", None)
    # The C struct of `_random.Random` holds it all, but for the number that `gauss` keeps for the next time.
    if not _CPYTHON or type(generator) is not random.Random or vars(generator).get("gauss_next") is not None:
        return random.getstate()
    if "python" not in _watched:
        base = random.Random.__base__
        assert base is not None
        place = (id(generator) + _HEADER, base.__basicsize__ - _HEADER)
        _watched["python"] = _Watched([place], random.getstate, generator)
    return _watched["python"].state()


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = numpy.random.get_bit_generator()
    watched = _watched.get("numpy")
    if watched is not None and watched._keep[0] is generator:
        return watched.state()
    ask = functools.partial(numpy.random.get_state, legacy=False)
    if not _CPYTHON or type(generator).__name__ != "MT19937":
        return ask()
    # Normal numbers come in pairs; the one left over is in the object around the generator.
    around = numpy.random.mtrand._rand
    _watched["numpy"] = _Watched(
        [
            (generator.ctypes.state_address, _NUMPY_BYTES),
            (id(around) + _HEADER, type(around).__basicsize__ - _HEADER),
        ],
        ask,
        (generator, around),
    )
    return _watched["numpy"].state()
