"""One measurement of bench_mpi: run by mpirun on every rank, one engine a run; rank 0 writes the medians."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep.distributed.mpi.backend import register_mpi_backend
from lightning_lockstep.launchers.environments import detect_environment


def median(function: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def step_of(batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [part for _ in range(10) for part in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    data = torch.randn(batch, 1024)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def main() -> None:
    backend, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    register_mpi_backend()
    env = detect_environment(mpi=True)
    rank, size = env.global_rank(), env.world_size()
    store = dist.TCPStore(env.main_address, env.main_port, size, False, multi_tenant=True)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=limit)
    found = {f"DDP step, batch {batch}": median(step_of(batch), 16) for batch in (32, 256)}
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
