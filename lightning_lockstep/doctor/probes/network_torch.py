"""One rank that tests a backend of torch, step by step: a line of JSON for each step, from standard input.

    python network_torch.py BACKEND RANK WORLD_SIZE LOCAL_RANK

Nothing of this package is imported, so that only the network is tested.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

_SMALL, _LARGE = 2, 4_000_000  # numbers of float32 in the two all-reduces that are timed
_ROUNDS, _LARGE_ROUNDS = 50, 5
_CPU_MEMORY, _DEVICE_MEMORY = 64, 256  # allocated for a try [MiB]


class Rank:
    """This rank: a method for each step."""

    def __init__(self, backend: str, rank: int, size: int, local_rank: int) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.backend, self.rank, self.size, self.local_rank = backend, rank, size, local_rank
        self.device = torch.device("cpu")
        self.store: Any = None

    def start(self, **_: Any) -> dict[str, Any]:
        """Report versions and devices."""
        count = self.torch.cuda.device_count() if self.torch.cuda.is_available() else 0
        nccl = self.dist.is_nccl_available()
        numbers = self.torch.cuda.nccl.version() if count and nccl else ()  # type: ignore[no-untyped-call]
        version = ".".join(map(str, numbers))
        return {
            "torch": self.torch.__version__,
            "devices": count,
            "uuids": self._uuids(count),
            "nccl": version,
            "gloo": self.dist.is_gloo_available(),
        }

    def _uuids(self, count: int) -> list[str]:
        """Return which devices this rank sees: where each has its own, all of them are number 0."""
        with suppress(RuntimeError, AttributeError):  # in use by somebody alone; gloo needs none of them
            return [str(self.torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        return []

    def listen(self, address: str, within: float) -> dict[str, Any]:
        """Open the store where the ranks meet, at one address of this host."""
        server = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        port = server.getsockname()[1]
        self.store = self.dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=within),
            master_listen_fd=server.detach(),
        )
        return {"port": port}

    def rendezvous(self, address: str, port: int, within: float) -> None:
        """Connect to the other ranks."""
        if self.backend == "nccl":
            # Under srun --gpus-per-task=1 each rank sees one device, its own.
            self.device = self.torch.device("cuda", self.local_rank % self.torch.cuda.device_count())
            self.torch.cuda.set_device(self.device)
        limit = timedelta(seconds=within)
        self.store = self.store or self.dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=limit
        )
        given: dict[str, Any] = {"device_id": self.device} if self.backend == "nccl" else {}
        self.dist.init_process_group(
            self.backend, store=self.store, rank=self.rank, world_size=self.size, timeout=limit, **given
        )

    def barrier(self, **_: Any) -> None:
        self.dist.barrier()
        self._wait()

    def all_reduce(self, **_: Any) -> None:
        """Add up the numbers of the ranks; the sum must be right."""
        value = self.torch.full((1000,), float(self.rank + 1), device=self.device)
        self.dist.all_reduce(value)
        self._wait()
        expected = self.size * (self.size + 1) / 2
        found = sorted(set(value.tolist()))
        if found != [expected]:
            raise ArithmeticError(
                f"the sum is {found[:3]}, not {expected}: the backend computes wrong numbers"
            )

    def memory(self, **_: Any) -> dict[str, Any]:
        """Allocate and write to memory of this rank's device."""
        size = _CPU_MEMORY if self.device.type == "cpu" else _DEVICE_MEMORY
        self.torch.ones(size * 2**20, dtype=self.torch.uint8, device=self.device)
        self._wait()
        return {"mebibytes": size, "device": str(self.device)}

    def speed(self, **_: Any) -> dict[str, Any]:
        """Time small and large all-reduces."""
        return {
            "latency": self._timed(_SMALL, _ROUNDS),
            "bandwidth": 4 * _LARGE / self._timed(_LARGE, _LARGE_ROUNDS),
        }

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


STEPS = ("start", "listen", "rendezvous", "barrier", "all_reduce", "memory", "speed")


def main() -> None:
    """Answer each step that is asked for, until there is no more."""
    backend, rank, size, local_rank = sys.argv[1], *map(int, sys.argv[2:5])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    this: Rank | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        step = asked.pop("step")
        try:
            if step not in STEPS:
                raise ValueError(f"no such step: {step}")
            this = this or Rank(backend, rank, size, local_rank)
            answer = {"ok": True, **(getattr(this, step)(**asked) or {})}
        except Exception as error:
            lines = str(error).strip().splitlines()
            answer = {"ok": False, "error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        answers.write(json.dumps({"step": step, **answer}) + "\n")
        answers.flush()
    os._exit(0)  # destroying the group could wait for a rank that has ended


if __name__ == "__main__":
    main()
