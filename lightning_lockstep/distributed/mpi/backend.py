"""The backend ``mpi4py``: MPI collectives for an ordinary build of torch.

    from lightning_lockstep.distributed import register_mpi_backend
    register_mpi_backend()
    torch.distributed.init_process_group("mpi4py", rank=..., world_size=..., store=...)

What its operations do with MPI is in :mod:`operations`, how they are carried out in :mod:`worker`. mpi4py is imported
when the first group is made, not before.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_lockstep._text import plain_table
from lightning_lockstep.distributed.guard.records import WORLD, group_title
from lightning_lockstep.distributed.mpi.runtime import MPIRuntime, start_runtime
from lightning_lockstep.errors import LaunchError

NAME = "mpi4py"


def register_mpi_backend() -> None:
    """Make the backend ``mpi4py`` known to torch.distributed; calling it again does nothing.

    Ranks: any rank, alone; mpi4py is not imported.
    """
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        # Torch 2.15 attaches its flight recorder to every other backend, which fails for one written in Python.
        recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(NAME)


def _create(given: Any, options: Any = None) -> dist.ProcessGroup:
    """Make a group; torch calls it on every rank of the group."""
    runtime = start_runtime()
    from lightning_lockstep.distributed.mpi.process_group import MPIProcessGroup

    rank, size, name = given.group_rank, given.group_size, str(given.group_id)
    # Torch lists no ranks for the default group.
    ranks = list(given.global_ranks_in_group) or range(size)
    members = mpi_ranks(runtime, given.store, rank, ranks, given.timeout)
    title = group_title(name, ranks) if given.global_ranks_in_group else WORLD
    comm, messages = runtime.worker.call(_communicators, runtime, members, name)
    return MPIProcessGroup(
        rank, size, runtime, comm, messages, title=title, ranks=ranks, timeout=given.timeout
    )


def mpi_ranks(
    runtime: MPIRuntime, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta
) -> list[int]:
    """Return the ranks of a group's members in ``COMM_WORLD``, once all of them are here."""
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
    # Only members take part, and ranks may make several groups at once: the tag keeps them apart.
    comm = world.Create_group(world.Get_group().Incl(members), zlib.crc32(name.encode()) % 32_000)
    return comm, comm.Dup()
