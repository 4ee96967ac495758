"""What is checked and put in order in the kernel of a notebook before its process is forked into ranks.

A fork copies memory, not threads. Whatever works with threads of its own must not have been started, or must be
stopped before: CUDA cannot, XLA cannot, OpenMP can.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path

import torch

from lightning_lockstep.distributed import shut_down
from lightning_lockstep.distributed.process_group import (
    current_group,
    forget_rendezvous,
    process_group_exists,
)
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.notebook.this_rank import notebook_rank

__all__ = ["check_kernel", "prepare_fork"]

_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5: end the threads, keep nothing
_MAPS = Path("/proc/self/maps")


def check_kernel() -> None:
    """Refuse to fork a kernel whose copies could not work."""
    if notebook_rank() is not None:
        raise LaunchError(
            "Ranks were to be started inside a rank that a notebook has started: expected a call in a cell. Inside a"
            " rank make a Trainer with as many devices as there are ranks; it uses the ranks that are there."
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise LaunchError(
            "CUDA was already used in this kernel, so it would not work in ranks that are forked from it: expected no"
            " call of torch.cuda, no tensor and no model on a GPU in any cell before. Restart the kernel, run the"
            " cells that need no GPU, and do the rest inside the function that the ranks run."
        )
    group = current_group()
    if process_group_exists() and group is not None and group.world_size > 1:
        raise LaunchError(
            f"This kernel is itself rank {group.rank} of {group.world_size} connected ranks: expected a kernel that is"
            " connected with none. Call torch.distributed.destroy_process_group() first, or restart the kernel."
        )


def prepare_fork() -> None:
    """Stop what would not survive the fork and can be started again on both sides."""
    if process_group_exists():  # of one rank: this kernel, from an earlier Trainer
        shut_down(destroy_process_group=True)
        gc.collect()
        forget_rendezvous()
    _end_openmp_threads()
    for stream in (sys.stdout, sys.stderr):  # what is buffered would be written by every rank too
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _end_openmp_threads() -> None:
    """End the threads of GNU OpenMP, which starts new ones when it needs them.

    After a fork its record of them is there, the threads are not, and the first operation that wants to work on
    several cores waits for them for ever. The libraries of Intel and LLVM look after this themselves.
    """
    for path in _loaded_libraries("libgomp"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD)


def _loaded_libraries(name: str) -> list[str]:
    paths = set()
    with suppress(OSError):  # another system than Linux has no such file
        for line in _MAPS.read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.rpartition("/")[2].startswith(name):
                paths.add(path)
    return sorted(paths)
