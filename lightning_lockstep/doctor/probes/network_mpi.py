"""One rank that tests MPI through mpi4py, step by step: a line of JSON for each step, from standard input.

    python network_mpi.py

Started below a process that mpirun, mpiexec or srun has started, it is that rank. Given ``--all`` it takes all steps
by itself and prints the results of rank 0: for ranks that an mpirun of the doctor starts.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

_SMALL, _LARGE = 8, 16_000_000  # of the two all-reduces that are timed [bytes]
_ROUNDS, _LARGE_ROUNDS = 50, 5


class Rank:
    """This rank: a method for each step."""

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.threads = False
        from mpi4py import MPI

        self.MPI, self.world = MPI, MPI.COMM_WORLD

    def start(self, **_: Any) -> dict[str, Any]:
        """Report the rank and size that MPI sees."""
        return {
            "rank": self.world.Get_rank(),
            "size": self.world.Get_size(),
            "library": self.MPI.Get_library_version().splitlines()[0].strip("\0 "),
            "host": socket.gethostname(),
        }

    def exchange(self, value: Any = None, **_: Any) -> dict[str, Any]:
        """Give every rank what rank 0 has been given."""
        data = json.dumps(value).encode() if self.world.Get_rank() == 0 else None
        return {"value": json.loads(self.world.bcast(data, root=0))}

    def barrier(self, **_: Any) -> None:
        self.world.Barrier()

    def all_reduce(self, **_: Any) -> None:
        """Add up the numbers of the ranks; the sum must be right."""
        found = self.world.allreduce(self.world.Get_rank() + 1)
        expected = self.world.Get_size() * (self.world.Get_size() + 1) // 2
        if found != expected:
            raise ArithmeticError(f"the sum is {found}, not {expected}: MPI computes wrong numbers")

    def speed(self, **_: Any) -> dict[str, Any]:
        """Time small and large all-reduces."""
        return {
            "latency": self._timed(_SMALL, _ROUNDS),
            "bandwidth": _LARGE / self._timed(_LARGE, _LARGE_ROUNDS),
        }

    def _timed(self, size: int, rounds: int) -> float:
        given, sums = bytearray(size), bytearray(size)
        for each in range(rounds + 1):
            if each == 1:
                began = time.perf_counter()
            self.world.Allreduce([given, self.MPI.FLOAT], [sums, self.MPI.FLOAT])
        return (time.perf_counter() - began) / rounds


STEPS = ("start", "exchange", "barrier", "all_reduce", "speed")


def main() -> None:
    """Answer each step that is asked for, until there is no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    this: Rank | None = None
    wanted = [json.dumps({"step": step}) for step in STEPS] if "--all" in sys.argv else sys.stdin
    for line in wanted:
        asked = json.loads(line)
        step = asked.pop("step")
        try:
            if step not in STEPS:
                raise ValueError(f"no such step: {step}")
            this = this or Rank()
            answer = {"ok": True, **(getattr(this, step)(**asked) or {})}
        except Exception as error:
            lines = str(error).strip().splitlines()
            answer = {"ok": False, "error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        rank = this.world.Get_rank() if this is not None else None
        answers.write(json.dumps({"step": step, "answering": rank, **answer}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
