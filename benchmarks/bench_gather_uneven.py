"""gather_uneven over Accelerate's pad_across_processes and gather, 2 ranks, gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engine import Comparison, Report, interleave
from tests.harness import run_ranks

PEER, OURS = "pad and gather", "gather_uneven"
# Rows of each rank, width, calls per sample.
SIZES = {
    "3 and 5 rows of 8": ((3, 5), 8, 200),
    "900 and 1000 rows of 256": ((900, 1000), 256, 50),
    "9,000 and 10,000 rows of 256": ((9_000, 10_000), 256, 8),
}


def padded(own: Tensor) -> list[Tensor]:
    """Gather as a user of Accelerate does: the lengths too, to cut the padding off."""
    from accelerate.utils import gather, pad_across_processes

    lengths = gather(torch.tensor([len(own)])).tolist()
    parts = gather(pad_across_processes(own)).chunk(len(lengths))
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def variants() -> dict[str, Callable[[Tensor], Any]]:
    from lightning_lockstep import gather_uneven

    return {PEER: padded, OURS: gather_uneven}


def measured(rows: tuple[int, ...], width: int, calls: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call, in turn on the same two ranks."""
    from accelerate.state import PartialState

    PartialState(cpu=True)
    own = torch.randn(rows[dist.get_rank()], width)

    def median_call(function: Callable[[Tensor], Any]) -> float:
        seconds = []
        for _ in range(calls):
            dist.barrier()
            started = time.perf_counter()
            function(own)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    timed = {name: lambda function=function: median_call(function) for name, function in variants().items()}
    return interleave(timed, rounds=rounds, warmup=1)


def run(quick: bool) -> Report:
    rounds = 2 if quick else 15
    tables = [
        Comparison(
            f"{title}, float32",
            run_ranks(2, measured, rows, width, calls, rounds)[0],
            peer=PEER,
            at_most={OURS: 1.0},
        )
        for title, (rows, width, calls) in SIZES.items()
    ]
    notes = [
        "Each sample is the median of many calls of both ranks, each after a barrier.",
        "The peer gathers the lengths as well, without which its padding cannot be told from data.",
        "Ours compares dtypes, numbers of dimensions and structure on every call; the peer does not.",
    ]
    return Report("gather_uneven over Accelerate's pad_across_processes and gather, 2 ranks", tables, notes)
