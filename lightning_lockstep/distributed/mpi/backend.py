"""The backend ``mpi4py``: MPI collectives for an ordinary build of torch.

    from lightning_lockstep.distributed import register_mpi_backend
    register_mpi_backend()
    torch.distributed.init_process_group("mpi4py", rank=..., world_size=..., store=...)

Each group is a separate MPI communicator. What its operations do is in :mod:`operations`, how they wait
in :mod:`progress`, how ranks are compared in :mod:`rank_check`. mpi4py is imported when the first group is
made, not before.

Torch 2.13 calls ``all_gather_single``, ``reduce_scatter_single`` and ``all_to_all_single`` where older
releases call ``_allgather_base``, ``_reduce_scatter_base`` and ``alltoall_base``; the group answers to both.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_lockstep._text import plain_table
from lightning_lockstep.distributed.guard.records import WORLD, group_title
from lightning_lockstep.distributed.mpi.runtime import MPIRuntime, start_runtime
from lightning_lockstep.errors import LaunchError

NAME = "mpi4py"


@dataclass(frozen=True, kw_only=True)
class MPIBackendOptions:
    """Options of a group, given as ``pg_options``.

    Attributes:
        check: Whether operation, shape and dtype are compared between the ranks before each operation.
        cuda_aware: Whether the MPI library takes CUDA memory; by default it is asked.
    """

    check: bool = True
    cuda_aware: bool | None = None


_defaults = MPIBackendOptions()


def default_options(options: MPIBackendOptions) -> None:
    """Set the options of groups that are made without any, sub-groups included; the same on all ranks."""
    global _defaults
    _defaults = options


def register_mpi_backend() -> None:
    """Make the backend ``mpi4py`` known to torch.distributed; calling it again does nothing.

    Ranks: any rank, alone; mpi4py is not imported.
    """
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        # From 2.15 on torch attaches its recorder, which fails for one in Python, to all that are not in this set.
        recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(NAME)


def _create(given: Any, options: MPIBackendOptions | None = None) -> dist.ProcessGroup:
    """Make a group; torch calls it on every rank of the group."""
    runtime = start_runtime()
    from lightning_lockstep.distributed.mpi.group_engine import GroupSettings
    from lightning_lockstep.distributed.mpi.process_group import MPIProcessGroup

    chosen = options if isinstance(options, MPIBackendOptions) else _defaults
    rank, size, name = given.group_rank, given.group_size, str(given.group_id)
    # Torch lists no ranks for the default group.
    ranks = list(given.global_ranks_in_group) or range(size)
    members = mpi_ranks(runtime, given.store, rank, ranks, given.timeout)
    settings = GroupSettings(
        name=group_title(name, ranks) if given.global_ranks_in_group else WORLD,
        ranks=ranks,
        timeout=given.timeout.total_seconds(),
        check=chosen.check and size > 1,
        cuda_aware=runtime.cuda_aware if chosen.cuda_aware is None else chosen.cuda_aware,
    )
    collectives, messages = runtime.call(_communicators, runtime, members, name)
    return MPIProcessGroup(given.store, rank, size, runtime, collectives, messages, settings)


def mpi_ranks(
    runtime: MPIRuntime, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta
) -> list[int]:
    """Return the ranks of a group's members in ``COMM_WORLD``."""
    # Groups without a common member may have one name, and so share a store, where each is made by its own
    # members alone, as ``new_subgroups(group=...)`` does. So the store keeps them by the ranks of the default
    # group.
    store.set(f"mpi/{ranks[rank]}", f"{runtime.rank} {runtime.size} {runtime.library}")
    keys = [f"mpi/{other}" for other in ranks]
    store.wait(keys, timeout)
    found = [bytes(value).decode().split(" ", 2) for value in store.multi_get(keys)]
    members = [int(one[0]) for one in found]
    if len(set(members)) < len(ranks) or len({(one[1], one[2]) for one in found}) > 1:
        rows = [(other, *one) for other, one in zip(ranks, found, strict=True)]
        table = plain_table(("rank", "rank in MPI", "size of MPI", "MPI library"), rows)
        raise LaunchError(
            f"The ranks were not started as one MPI job:\n\n{table}\n\n"
            "Start all of them with one mpirun or mpiexec, the one that belongs to the MPI library which"
            " mpi4py loads. With `srun`, give --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)."
        )
    return members


def _communicators(runtime: MPIRuntime, members: list[int], name: str) -> tuple[Any, Any]:
    world = runtime.MPI.COMM_WORLD
    group = world.Get_group().Incl(members)
    # Only members take part, and ranks may make several groups at once: the tag keeps them apart.
    collectives = world.Create_group(group, zlib.crc32(name.encode()) % 32_000)
    return collectives, collectives.Dup()
