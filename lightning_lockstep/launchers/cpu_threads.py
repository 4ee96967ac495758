"""How many CPU threads a rank may use, and on which cores."""

from __future__ import annotations

import os
from typing import Literal

import torch

from lightning_lockstep._system import usable_cores
from lightning_lockstep.errors import ConfigurationError

__all__ = ["apply_threads", "plan_threads"]


def plan_threads(
    threads_per_rank: int | Literal["auto"], *, cores: tuple[int, ...], local_rank: int, local_world_size: int
) -> tuple[int, tuple[int, ...]]:
    """Return the number of threads of a rank, and its own cores, which more ranks than cores share."""
    share = max(1, len(cores) // local_world_size)
    threads = share if threads_per_rank == "auto" else int(threads_per_rank)
    width = min(max(threads, 1), len(cores))
    first = (local_rank * width) % len(cores)
    mine = tuple(cores[(first + i) % len(cores)] for i in range(width))
    return threads, mine


def apply_threads(
    threads_per_rank: int | Literal["auto"], *, bind_cores: bool, local_rank: int, local_world_size: int
) -> tuple[int, tuple[int, ...]]:
    """Set the number of threads of this rank, and pin it to its cores if asked.

    ``OMP_NUM_THREADS`` set by the user (or by ``torchrun``) wins over ``auto``.
    """
    cores = usable_cores()
    threads, mine = plan_threads(
        threads_per_rank, cores=cores, local_rank=local_rank, local_world_size=local_world_size
    )
    chosen_outside = os.environ.get("OMP_NUM_THREADS", "")
    if threads_per_rank == "auto" and chosen_outside.isdigit() and int(chosen_outside) > 0:
        threads = int(chosen_outside)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if not bind_cores:
        return threads, cores  # all that it may use
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError(
            "bind_cores=True was given, but this operating system cannot pin a process to cores;"
            " leave it out, or bind with the program that starts the ranks."
        )
    os.sched_setaffinity(0, mine)
    return threads, mine
