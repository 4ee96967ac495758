"""What the programs under MPI begin with, and how they hand back what they saw."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_lockstep.distributed.mpi.backend import register_mpi_backend
from lightning_lockstep.launchers.environments import detect_environment


def meet(seconds=60):
    """Open the default group over mpi4py, whose operations may take ``seconds``; return (rank, world size)."""
    register_mpi_backend()
    env = detect_environment(mpi=True)
    rank, size = env.global_rank(), env.world_size()
    store = dist.TCPStore(env.main_address, env.main_port, size, False, multi_tenant=True)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("mpi4py", rank=rank, world_size=size, store=store, timeout=limit)
    return rank, size


def hand_back(rank, seen):
    """Write down what this rank saw, in the folder that the program was given, and close the group."""
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
