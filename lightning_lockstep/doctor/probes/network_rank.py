"""One rank that tests one backend, step by step: a line of JSON for each step, up to the first that fails.

    python network_rank.py gloo|nccl RANK WORLD_SIZE LOCAL_RANK ADDRESS PORT PREFIX TIMEOUT

Ranks of torch meet over the store at ADDRESS and PORT, under keys that begin with PREFIX. Nothing of this package is
imported, so that only the network is tested. A rank of MPI takes its steps in the process that mpirun or srun starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

Answer = dict[str, Any]

_LARGE = 4_000_000  # numbers of float32 in the large all-reduce: 16 MB
_CPU_MEMORY, _DEVICE_MEMORY = 64, 256  # allocated for a try [MiB]
_LOOK_EVERY = 0.02  # [s]


class TorchRank:
    """A rank of a backend of torch: a method for each step."""

    steps = ("start", "meet", "rendezvous", "barrier", "all_reduce", "memory", "large")

    def __init__(self, backend: str, *arguments: str) -> None:
        self.backend, (rank, size, local_rank, self.address, port, self.prefix, timeout) = backend, arguments
        self.rank, self.size, self.local_rank, self.port = int(rank), int(size), int(local_rank), int(port)
        self.timeout = timedelta(seconds=float(timeout))

    def start(self) -> None:
        """Import torch, take a device, and connect to the store."""
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.device = torch.device("cpu")
        if self.backend == "nccl":
            # Under srun --gpus-per-task=1 each rank sees one device, its own.
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        store = dist.TCPStore(self.address, self.port, timeout=self.timeout, wait_for_workers=False)
        self.store = dist.PrefixStore(self.prefix, store)
        self.store.set(f"device/{self.rank}", self._name_of_device())

    def _name_of_device(self) -> str:
        if self.device.type == "cpu":
            return f"cpu {self.rank}"
        with suppress(RuntimeError, AttributeError):  # another process may use the device exclusively
            return str(self.torch.cuda.get_device_properties(self.device).uuid)
        return f"unknown {self.rank}"

    def meet(self) -> None:
        """Wait until all ranks have started, so that no later step waits for one that still imports."""
        keys = [f"device/{rank}" for rank in range(self.size)]
        while not self.store.check(keys):
            if self.store.check(["failed"]):
                raise RuntimeError("another rank did not start")
            time.sleep(_LOOK_EVERY)
        devices = [bytes(self.store.get(key)).decode() for key in keys]
        if len(set(devices)) < self.size:
            raise LookupError(f"{self.size} ranks have {len(set(devices))} devices")

    def rendezvous(self) -> None:
        self.dist.init_process_group(
            self.backend,
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            device_id=None if self.device.type == "cpu" else self.device,
        )

    def barrier(self) -> None:
        self.dist.barrier()
        self._wait()

    def all_reduce(self) -> None:
        """Add up the numbers of the ranks; the sum must be right."""
        value = self.torch.full((1000,), float(self.rank + 1), device=self.device)
        self.dist.all_reduce(value)
        self._wait()
        check_sum(sorted(set(value.tolist())), self.size)

    def memory(self) -> None:
        size = _CPU_MEMORY if self.device.type == "cpu" else _DEVICE_MEMORY
        self.torch.ones(size * 2**20, dtype=self.torch.uint8, device=self.device)
        self._wait()

    def large(self) -> None:
        """Add up more numbers than a packet holds."""
        self.dist.all_reduce(self.torch.zeros(_LARGE, device=self.device))
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()


class MPIRank:
    """A rank of MPI, a method for each step."""

    steps = ("start", "barrier", "all_reduce", "large")

    def __init__(self, size: int) -> None:
        self.size = size

    def start(self) -> None:
        """Start MPI if it has not been, and make sure that it sees all ranks."""
        from mpi4py import MPI

        self.MPI, self.world = MPI, MPI.COMM_WORLD
        library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        if (size := self.world.Get_size()) != self.size:
            raise RuntimeError(
                f"{self.size} ranks were started, but MPI sees {size}: mpi4py loads another MPI ({library}) than"
                " the one that starts the ranks"
            )

    def barrier(self) -> None:
        self.world.Barrier()

    def all_reduce(self) -> None:
        """Add up the numbers of the ranks; the sum must be right."""
        check_sum([self.world.allreduce(self.world.Get_rank() + 1)], self.size)

    def large(self) -> None:
        """Add up more numbers than a packet holds."""
        self.world.Allreduce([bytearray(4 * _LARGE), self.MPI.FLOAT], [bytearray(4 * _LARGE), self.MPI.FLOAT])


def check_sum(found: list[float], size: int) -> None:
    expected = size * (size + 1) / 2
    if found != [expected]:
        raise ArithmeticError(f"the sum is {found[:3]}, not {expected}: the backend computes wrong numbers")


def take(rank: TorchRank | MPIRank, step: str) -> Answer:
    """Take a step; return what it answers and how long it took, or its error."""
    began = time.perf_counter()
    try:
        getattr(rank, step)()
        answer: Answer = {"ok": True}
    except Exception as error:
        lines = str(error).strip().splitlines()
        answer = {"ok": False, "error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
    return {**answer, "seconds": round(time.perf_counter() - began, 6)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    rank = TorchRank(*sys.argv[1:])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a step that hangs ends with the doctor
    for step in rank.steps:
        answer = take(rank, step)
        answers.write(json.dumps({"step": step, **answer}) + "\n")
        if not answer["ok"]:
            break
    sys.stdin.read()  # the other ranks may still need this one
    os._exit(0)  # destroying the group could wait for a rank that has ended


if __name__ == "__main__":
    main()
