"""One file written whole or not at all, and memory for what goes into it."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from torch import Tensor

from lightning_lockstep._system import memory_limit

__all__ = ["Allocate", "Storage", "in_memory", "memory_budget", "replacing", "save"]

#: Gives an empty tensor of a shape and dtype.
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]


def in_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


class Storage:
    """Gives memory while there is enough, afterwards files that go when nothing refers to them."""

    def __init__(self, folder: Path, budget: int) -> None:  # how much memory it may give [bytes]
        self._folder, self._budget = folder, budget

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        numel = math.prod(shape)
        size = numel * dtype.itemsize
        if size <= self._budget:
            self._budget -= size
            return in_memory(shape, dtype)
        with tempfile.NamedTemporaryFile(prefix=".consolidate.", dir=self._folder) as file:
            _reserve(file.fileno(), size)
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype).view(tuple(shape))


def _reserve(file: int, size: int) -> None:
    """Claim space on the disk: a mapped file that does not fit ends the process."""
    reserve = getattr(os, "posix_fallocate", None)  # not on macOS
    if reserve is not None:
        reserve(file, 0, size)


def memory_budget() -> int:
    """Return how much memory a checkpoint may take here: half of what is available [bytes]."""
    return min(int(psutil.virtual_memory().available), memory_limit()[0]) // 2


def save(content: dict[str, Any], file: IO[bytes]) -> None:
    """Write a checkpoint as ``torch.save`` does, with the error of the system where the disk refuses."""
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch's writer says only at which position it stood; the fault itself came before.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


@contextmanager
def replacing(output: Path) -> Iterator[IO[bytes]]:
    """Open a file beside ``output``, which takes its place when all is written."""
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)
