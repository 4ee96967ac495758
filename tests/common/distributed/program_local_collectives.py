"""Rank 1 of an MPI job answers the collectives of the backend mpi4py by itself; writes down what it saw."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_lockstep.distributed.mpi.backend import register_mpi_backend
from lightning_lockstep.launchers.environments import MPIEnvironment
from tests.programs.distributed.test_local_collectives import one_alone


def main() -> None:
    register_mpi_backend()
    env = MPIEnvironment()
    rank, size = env.global_rank(), env.world_size()
    store = dist.TCPStore(env.main_address, env.main_port, size, False, multi_tenant=True)
    dist.init_process_group("mpi4py", rank=rank, world_size=size, store=store, timeout=timedelta(seconds=30))
    attributes = set(vars(dist.group.WORLD))
    found, *sums = one_alone(1)
    assert sums == [6.0, 2.0], sums
    assert set(vars(dist.group.WORLD)) == attributes
    if found is not None:
        Path(sys.argv[1], "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
