"""The sizes at which large reductions over mpi4py are cut: each against the one that the package uses."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from benchmarks.bench_mpi import on_one_host
from benchmarks.engine import Comparison, Report, interleave
from lightning_lockstep.distributed.mpi.limits import LIMITS
from tests.distributed.mpi.launch import why_no

MB = 2**20
ENGINES = {
    "Pieces that MPI reduces, without shared memory": "mpi4py, messages only",
    "Slices in shared memory": "mpi4py",
    "Size of the shared memory": "mpi4py",
}
SETTING = dict(zip(ENGINES, ("piece", "slice", "shared"), strict=True))
SIZES = {
    "piece": (2 * MB, 8 * MB, 32 * MB, 256 * MB),
    "slice": (MB // 2, MB, 2 * MB),
    "shared": (8 * MB, 16 * MB, 48 * MB),
}
ROWS = ("all-reduce 1 MB", "all-reduce 25 MB", "all-reduce 100 MB", "DDP step, batch 32")


def compare(title: str, rounds: int) -> list[Comparison]:
    """One comparison for each row; every size in runs of its own, in turn."""
    setting, taken = SETTING[title], {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")

        def run(size: int) -> float:
            os.environ["BENCH_LIMITS"] = json.dumps({setting: size})
            on_one_host("open_mpi", 2)(ENGINES[title], out)
            for row, seconds in json.loads(out.read_text()).items():
                taken.setdefault(row, {}).setdefault(name_of(size), []).append(seconds)
            return 0.0

        variants = {name_of(size): lambda size=size: run(size) for size in SIZES[setting]}  # type: ignore[misc]
        try:
            interleave(variants, rounds=rounds, progress=lambda line: print(f"{title}: {line}", flush=True))
        finally:
            del os.environ["BENCH_LIMITS"]
    peer = name_of(getattr(LIMITS, setting))
    return [Comparison(f"{title}: {row}", taken[row], peer=peer) for row in ROWS]


def name_of(size: int) -> str:
    return f"{size / MB:g} MB" if size < 256 * MB else "whole"


def run(quick: bool) -> Report:
    reason = why_no("open_mpi")
    if reason:
        return Report("Sizes of pieces over mpi4py", [], [f"Open MPI: {reason}."])
    rounds = 1 if quick else int(os.environ.get("BENCH_ROUNDS", "5"))
    tables = [table for title in ENGINES for table in compare(title, rounds)]
    notes = [
        "Open MPI, 2 ranks on one host. The variant compared with is the size that the package uses.",
        "A rank's slot in shared memory holds a slice for each rank of the node; with slots of that size the"
        " memory gives each rank as many as fit into it, which it uses in turn.",
        "Little shared memory is fast while the two cores share a cache and slow while they don't; a virtual"
        " machine's cores do the one or the other from minute to minute. 48 MB is what keeps its time in both.",
    ]
    return Report("Sizes of pieces over mpi4py", tables, notes)
