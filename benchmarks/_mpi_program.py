"""One measurement of bench_mpi: run by mpirun on every rank, one engine a run; rank 0 writes the medians."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep.distributed.mpi.backend import MPIBackendOptions, register_mpi_backend
from lightning_lockstep.distributed.mpi.operations import LIMITS
from lightning_lockstep.launchers.environments import MPIEnvironment

SIZES = {"4 KB": 2**12, "1 MB": 2**20, "25 MB": 25 * 2**20, "100 MB": 100 * 2**20}


def median(function: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def bare(tensor: torch.Tensor, times: int) -> float:
    from mpi4py import MPI

    memory = tensor.numpy()
    return median(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, memory), times)


def copy_and_add(tensor: torch.Tensor, times: int) -> float:
    """What the sum of two ranks does with memory, without another rank."""
    scratch = torch.zeros(min(tensor.numel(), 2**19))

    def work() -> None:
        for piece in tensor.split(scratch.numel()):
            scratch[: piece.numel()].copy_(piece)
            piece.add_(scratch[: piece.numel()])

    return median(work, times)


def step_of(model: torch.nn.Module, batch: int, *, reduced: bool) -> Callable[[], None]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if reduced else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    data = torch.randn(batch, 1024)

    def step() -> None:
        optimizer.zero_grad(set_to_none=reduced)
        wrapped(data).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def main() -> None:
    engine, out = sys.argv[1], Path(sys.argv[2])
    if os.environ.get("BENCH_AUTOGROUP"):  # a machine that others use too: this session first
        Path("/proc/self/autogroup").write_text(os.environ["BENCH_AUTOGROUP"])
    for name, size in json.loads(os.environ.get("BENCH_LIMITS", "{}")).items():
        setattr(LIMITS, name, size)
    torch.set_num_threads(1)
    register_mpi_backend()
    env = MPIEnvironment()
    rank, size = env.global_rank(), env.world_size()
    store = dist.TCPStore(env.main_address, env.main_port, size, False, multi_tenant=True)
    options = MPIBackendOptions(check=engine != "mpi4py, no check") if engine.startswith("mpi4py") else None
    backend = "gloo" if engine in ("gloo", "copy and add", "no reduction") else "mpi4py"
    limit = timedelta(seconds=60)
    dist.init_process_group(
        backend, rank=rank, world_size=size, store=store, timeout=limit, pg_options=options
    )
    found = {}
    for name, count in SIZES.items() if engine != "no reduction" else ():
        tensor = torch.zeros(count // 4)
        times = max(5, min(500, 2**27 // count // 4))
        if engine in ("bare mpi4py", "copy and add"):
            alone = bare if engine == "bare mpi4py" else copy_and_add
            found[f"all-reduce {name}"] = alone(tensor, times)
        else:
            for _ in range(2):
                dist.all_reduce(tensor)
            found[f"all-reduce {name}"] = median(lambda t=tensor: dist.all_reduce(t), times)  # type: ignore[misc]
    if engine in ("gloo", "mpi4py", "no reduction"):
        for batch in (32,) if "BENCH_LIMITS" in os.environ else (32, 256):
            torch.manual_seed(0)
            layers = [part for _ in range(10) for part in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
            step = step_of(torch.nn.Sequential(*layers), batch, reduced=engine != "no reduction")
            found[f"DDP step, batch {batch}"] = median(step, 16)
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
