"""Rank 1 exits while ranks 0 and 2 disagree and go on between themselves, and then need it."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_lockstep.distributed.mpi.backend import register_mpi_backend
from lightning_lockstep.errors import CollectiveMismatchError
from lightning_lockstep.launchers.environments import detect_environment


def main():
    register_mpi_backend()
    env = detect_environment(mpi=True)
    rank, size = env.global_rank(), env.world_size()
    store = dist.TCPStore(env.main_address, env.main_port, size, False, multi_tenant=True)
    dist.init_process_group("mpi4py", rank=rank, world_size=size, store=store, timeout=timedelta(seconds=8))
    pair = dist.new_group([0, 2])
    if rank == 1:
        sys.exit(3)
    try:
        dist.all_reduce(torch.ones(3 + rank), group=pair)
    except CollectiveMismatchError as error:
        if rank == 0:
            print(error, flush=True)
    dist.all_reduce(torch.ones(3), group=pair)
    if rank == 0:
        print("the pair went on", flush=True)
    dist.all_reduce(torch.ones(3))


if __name__ == "__main__":
    main()
