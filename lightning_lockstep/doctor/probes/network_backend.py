"""One rank that tests a backend, step by step: a line of JSON for each step, up to the first that fails.

    python network_backend.py gloo|nccl RANK WORLD_SIZE LOCAL_RANK ADDRESS_OF_RANK_0 TIMEOUT
    python network_backend.py mpi4py WORLD_SIZE [--all]

It waits for a line of standard input before the first step in which ranks wait for each other, so that none waits for
another that still imports; with ``--all`` it takes all steps at once. MPI's rank is that of the process of mpirun,
mpiexec or srun above it. Nothing of this package is imported, so that only the network is tested.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

_ROUNDS, _LARGE_ROUNDS = 50, 5
_NUMBERS, _LARGE_NUMBERS = 2, 4_000_000  # of float32 in the two all-reduces that are timed
_CPU_MEMORY, _DEVICE_MEMORY = 64, 256  # allocated for a try [MiB]


class TorchRank:
    """A rank of a backend of torch: a method for each step."""

    def __init__(
        self, backend: str, rank: str, size: str, local_rank: str, address: str, timeout: str
    ) -> None:
        self.backend, self.rank, self.size = backend, int(rank), int(size)
        self.local_rank, self.address = int(local_rank), address
        self.timeout = timedelta(seconds=float(timeout))
        self.store: Any = None
        # Before and after all ranks have started.
        self.steps = (
            ("start", "listen") if self.rank == 0 else ("start",),
            ("rendezvous", "barrier", "all_reduce", "memory", "speed"),
        )

    def start(self) -> dict[str, Any]:
        """Import torch, and report versions and devices."""
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.device = torch.device("cpu")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        has_nccl = count and dist.is_nccl_available()
        numbers = torch.cuda.nccl.version() if has_nccl else ()  # type: ignore[no-untyped-call]
        return {"devices": count, "uuids": self._uuids(count), "nccl": ".".join(map(str, numbers))}

    def _uuids(self, count: int) -> list[str]:
        """Return which devices this rank sees: where each has its own, all of them are number 0."""
        with suppress(RuntimeError, AttributeError):  # in use by somebody alone; gloo needs none of them
            return [str(self.torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        return []

    def listen(self) -> dict[str, Any]:
        """Open the store where the ranks meet, at one address of rank 0's host."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        server = socket.create_server((self.address, 0), family=family)
        port = server.getsockname()[1]
        self.store = self.dist.TCPStore(
            self.address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            master_listen_fd=server.detach(),
        )
        return {"port": port}

    def rendezvous(self, port: int) -> None:
        """Connect to the other ranks."""
        given: dict[str, Any] = {}
        if self.backend == "nccl":
            # Under srun --gpus-per-task=1 each rank sees one device, its own.
            self.device = self.torch.device("cuda", self.local_rank % self.torch.cuda.device_count())
            self.torch.cuda.set_device(self.device)
            given = {"device_id": self.device}
        self.store = self.store or self.dist.TCPStore(
            self.address, port, is_master=False, wait_for_workers=False, timeout=self.timeout
        )
        self.dist.init_process_group(
            self.backend,
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            **given,
        )

    def barrier(self) -> None:
        self.dist.barrier()
        self._wait()

    def all_reduce(self) -> None:
        """Add up the numbers of the ranks; the sum must be right."""
        value = self.torch.full((1000,), float(self.rank + 1), device=self.device)
        self.dist.all_reduce(value)
        self._wait()
        check_sum(sorted(set(value.tolist())), self.size, "the backend")

    def memory(self) -> None:
        """Allocate and write to memory of this rank's device."""
        size = _CPU_MEMORY if self.device.type == "cpu" else _DEVICE_MEMORY
        self.torch.ones(size * 2**20, dtype=self.torch.uint8, device=self.device)
        self._wait()

    def speed(self) -> dict[str, float]:
        """Time small and large all-reduces."""
        return speed_of(self._timed)

    def _timed(self, count: int, rounds: int) -> float:
        value = self.torch.zeros(count, device=self.device)
        self.dist.all_reduce(value)
        self._wait()
        began = time.perf_counter()
        for _ in range(rounds):
            self.dist.all_reduce(value)
        self._wait()
        return (time.perf_counter() - began) / rounds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()


class MPIRank:
    """A rank of MPI, through mpi4py: a method for each step."""

    steps = (("start",), ("exchange", "barrier", "all_reduce", "speed"))

    def __init__(self, size: str) -> None:
        ranks = (os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"))
        self.rank = int(next(filter(None, ranks), "0"))
        self.size = int(size)

    def start(self) -> dict[str, Any]:
        """Start MPI, and make sure that it sees all ranks."""
        import mpi4py

        mpi4py.rc.threads = False
        from mpi4py import MPI

        self.MPI, self.world = MPI, MPI.COMM_WORLD
        library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        if (size := self.world.Get_size()) != self.size:
            raise RuntimeError(
                f"{self.size} ranks were started, but MPI sees {size}: mpi4py loads another MPI ({library}) than"
                " the one that starts the ranks"
            )
        return {"library": library}

    def exchange(self, value: Any = None) -> dict[str, Any]:
        """Give every rank what rank 0 has been given."""
        return {"value": self.world.bcast(value, root=0)}

    def barrier(self) -> None:
        self.world.Barrier()

    def all_reduce(self) -> None:
        """Add up the numbers of the ranks; the sum must be right."""
        check_sum([self.world.allreduce(self.world.Get_rank() + 1)], self.size, "MPI")

    def speed(self) -> dict[str, float]:
        """Time small and large all-reduces."""
        return speed_of(self._timed)

    def _timed(self, count: int, rounds: int) -> float:
        given, sums = bytearray(4 * count), bytearray(4 * count)
        self.world.Allreduce([given, self.MPI.FLOAT], [sums, self.MPI.FLOAT])
        began = time.perf_counter()
        for _ in range(rounds):
            self.world.Allreduce([given, self.MPI.FLOAT], [sums, self.MPI.FLOAT])
        return (time.perf_counter() - began) / rounds


def check_sum(found: list[float], size: int, what: str) -> None:
    expected = size * (size + 1) / 2
    if found != [expected]:
        raise ArithmeticError(f"the sum is {found[:3]}, not {expected}: {what} computes wrong numbers")


def speed_of(timed: Callable[[int, int], float]) -> dict[str, float]:
    return {
        "latency": timed(_NUMBERS, _ROUNDS),
        "bandwidth": 4 * _LARGE_NUMBERS / timed(_LARGE_NUMBERS, _LARGE_ROUNDS),
    }


def main() -> None:
    """Take each step, and answer for it."""
    name, *arguments = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    waits = arguments[-1] != "--all"
    this: Any = MPIRank(arguments[0]) if name == "mpi4py" else TorchRank(name, *arguments)

    def passes(step: str, given: dict[str, Any]) -> bool:
        began = time.perf_counter()
        try:
            answer = {"ok": True, **(getattr(this, step)(**given) or {})}
        except Exception as error:
            lines = str(error).strip().splitlines()
            answer = {"ok": False, "error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        answer["seconds"] = round(time.perf_counter() - began, 6)
        answers.write(json.dumps({"step": step, "rank": this.rank, **answer}) + "\n")
        answers.flush()
        return bool(answer["ok"])

    before, after = this.steps
    if all(passes(step, {}) for step in before):
        given = json.loads(sys.stdin.readline() or "{}") if waits else {}
        for step in after:
            if not passes(step, given):
                break
            given = {}
    if waits:  # others may wait for this rank, or the store in it: it stays until all have answered
        sys.stdin.read()
    if name != "mpi4py":
        os._exit(0)  # destroying the group could wait for a rank that has ended


if __name__ == "__main__":
    main()
