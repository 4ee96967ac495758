"""Two processes that add numbers through shared memory, again and again, as ranks of one host do.

A kernel on which that hangs never lets this end; the doctor ends it then.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from array import array
from typing import Any

_ROUNDS, _VALUES = 200, 4096


def main() -> None:
    """Let two processes add, and print how often."""
    context = multiprocessing.get_context("fork")
    memory = context.RawArray("d", 2 * _VALUES)
    barrier, wrong = context.Barrier(2), context.Value("i", 0)
    ranks = [context.Process(target=_add, args=(rank, memory, barrier, wrong)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if wrong.value or any(rank.exitcode for rank in ranks):
        sys.exit(
            f"{wrong.value} of {_ROUNDS} sums were wrong, exit codes {[rank.exitcode for rank in ranks]}"
        )
    sys.stdout.write(json.dumps({"rounds": _ROUNDS, "values": _VALUES}) + "\n")


def _add(rank: int, memory: Any, barrier: Any, wrong: Any) -> None:
    """Write this rank's values, add them to the other's, and compare the sum with what it must be."""
    own = slice(rank * _VALUES, (rank + 1) * _VALUES)
    for number in range(_ROUNDS):
        memory[own] = array("d", [float(number + rank)] * _VALUES)
        barrier.wait()
        total = sum(memory[:_VALUES]) + sum(memory[_VALUES:])
        barrier.wait()
        if total != _VALUES * (2 * number + 1):
            with wrong.get_lock():
                wrong.value += 1


if __name__ == "__main__":
    main()
