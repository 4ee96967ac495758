"""Collectives and DDP steps over mpi4py against gloo: 2 and 4 ranks, Open MPI and MPICH, two hosts."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine import Comparison, Report
from tests.common.distributed.mpi.launch import mpi_command, mpi_environ, why_no
from tests.helpers import run_script
from tests.helpers.cluster import Cluster, why_not

PROGRAM = str(Path(__file__).with_name("_mpi_program.py"))
PEER = "gloo"
ENGINES = (PEER, "mpi4py", "mpi4py, no check", "bare mpi4py", "copy and add", "no reduction")
NAMES = {"open_mpi": "Open MPI", "mpich": "MPICH"}
# Ratio to gloo that is wanted on one host with 2 ranks.
GOALS = {
    "all-reduce 4 KB": 0.05,
    "all-reduce 1 MB": 0.5,
    "all-reduce 25 MB": 0.45,
    "all-reduce 100 MB": 0.6,
    "DDP step, batch 32": 0.68,
    "DDP step, batch 256": 0.90,
}
Start = Callable[[str, Path], None]


def on_one_host(kind: str, ranks: int) -> Start:
    def start(engine: str, out: Path) -> None:
        environ = {**mpi_environ(), **{k: v for k, v in os.environ.items() if k.startswith("BENCH_")}}
        done = run_script([*mpi_command(kind, ranks), PROGRAM, engine, str(out)], env=environ, timeout=150)
        if done.returncode:
            raise RuntimeError(done.output)

    return start


def on_two_hosts(cluster: Cluster) -> Start:
    def start(engine: str, out: Path) -> None:
        command = [*cluster.mpi_command(2), PROGRAM, engine, str(out)]
        code, output = cluster.run(0, command, timeout=200, env={**os.environ, **mpi_environ()})
        if code:
            raise RuntimeError(output)

    return start


def measure(
    title: str, start: Start, rounds: int, goals: dict[str, float], engines: tuple[str, ...] = ENGINES
) -> list[Comparison]:
    """Each engine in runs of its own, in turn; one comparison for each row that was measured."""
    taken: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(rounds):
            shift = round_number % len(engines)
            for engine in engines[shift:] + engines[:shift]:
                print(f"{title}: {engine}, round {round_number + 1} of {rounds}", flush=True)
                out = Path(folder, "out.json")
                start(engine, out)
                for row, seconds in json.loads(out.read_text()).items():
                    taken.setdefault(row, {}).setdefault(engine, []).append(seconds)
    return [
        Comparison(
            f"{title}: {row}", samples, peer=PEER, at_most={"mpi4py": goals[row]} if row in goals else {}
        )
        for row, samples in taken.items()
    ]


def run(quick: bool) -> Report:
    rounds = 1 if quick else int(os.environ.get("BENCH_ROUNDS", "3"))
    tables: list[Comparison] = []
    notes: list[str] = []
    for kind, name in NAMES.items():
        reason = why_no(kind)
        if reason:
            notes.append(f"{name}: {reason}.")
            continue
        goals = {**GOALS, "DDP step, batch 32": 0.68 if kind == "open_mpi" else 0.62}
        tables += measure(f"{name}, 2 ranks, one host", on_one_host(kind, 2), rounds, goals)
        if not quick:
            tables += measure(f"{name}, 4 ranks, one host", on_one_host(kind, 4), 1, {}, ENGINES[:2])
    reason = why_not()
    if reason:
        notes.append(f"Two hosts: {reason}.")
    elif not quick:
        with Cluster() as cluster:
            tables += measure("Open MPI, two hosts of 2 ranks", on_two_hosts(cluster), 1, {}, ENGINES[:2])
    notes += [
        "DDP steps: an MLP of 10 layers of 1024 x 1024 (10.5 M parameters), 1 thread per rank, gradients"
        " as bucket views.",
        "`no reduction` is the same step of a model that is not wrapped, on both ranks at once: what a step"
        " would take if reductions cost nothing.",
        "`bare mpi4py` is one `Allreduce` of the whole buffer, without torch; what our group adds to it at"
        " 4 KB is the difference of the two rows.",
        "Our group gives MPI reductions in pieces of 8 MB, which stay in the cache.",
        "`copy and add` is each rank for itself, both at once: what an all-reduce of two ranks would take if they"
        " never had to wait for each other. This copying of memory is the limit of large reductions on one host.",
        "The two hosts are network namespaces of this machine with a virtual cable between them.",
    ]
    return Report("MPI collectives over mpi4py against gloo", tables, notes)
