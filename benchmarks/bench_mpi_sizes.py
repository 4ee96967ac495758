"""The size of the pieces in which MPI is given large reductions: others against the one that the package uses."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from benchmarks.bench_mpi import on_one_host
from benchmarks.engine import Comparison, Report, interleave
from lightning_lockstep.distributed.mpi.operations import LIMITS
from tests.common.distributed.mpi.launch import why_no

MB = 2**20
SIZES = (2 * MB, 8 * MB, 32 * MB, 256 * MB)
ROWS = ("all-reduce 1 MB", "all-reduce 25 MB", "all-reduce 100 MB", "DDP step, batch 32")


def compare(rounds: int) -> list[Comparison]:
    """One comparison for each row; every size in runs of its own, in turn."""
    taken: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")

        def run(size: int) -> float:
            os.environ["BENCH_LIMITS"] = json.dumps({"piece": size})
            on_one_host("open_mpi", 2)("mpi4py", out)
            for row, seconds in json.loads(out.read_text()).items():
                taken.setdefault(row, {}).setdefault(name_of(size), []).append(seconds)
            return 0.0

        variants = {name_of(size): lambda size=size: run(size) for size in SIZES}  # type: ignore[misc]
        try:
            interleave(variants, rounds=rounds, progress=lambda line: print(f"Pieces: {line}", flush=True))
        finally:
            del os.environ["BENCH_LIMITS"]
    peer = name_of(LIMITS.piece)
    return [Comparison(f"Pieces that MPI reduces: {row}", taken[row], peer=peer) for row in ROWS]


def name_of(size: int) -> str:
    return f"{size / MB:g} MB" if size < 256 * MB else "whole"


def run(quick: bool) -> Report:
    reason = why_no("open_mpi")
    if reason:
        return Report("Sizes of pieces over mpi4py", [], [f"Open MPI: {reason}."])
    rounds = 1 if quick else int(os.environ.get("BENCH_ROUNDS", "5"))
    notes = ["Open MPI, 2 ranks on one host. The variant compared with is the size that the package uses."]
    return Report("Sizes of pieces over mpi4py", compare(rounds), notes)
