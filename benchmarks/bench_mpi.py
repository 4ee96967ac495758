"""DDP steps over mpi4py against gloo: 2 ranks with Open MPI and MPICH, and two hosts."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine import Comparison, Report
from tests.harness import run_script
from tests.harness.cluster import Cluster, why_not
from tests.models.distributed.mpi.launch import mpi_command, mpi_environ, why_no

PROGRAM = str(Path(__file__).with_name("_mpi_program.py"))
PEER = "gloo"
ENGINES = (PEER, "mpi4py")
NAMES = {"open_mpi": "Open MPI", "mpich": "MPICH"}
Start = Callable[[str, Path], None]


def on_one_host(kind: str) -> Start:
    def start(engine: str, out: Path) -> None:
        command = [*mpi_command(kind, 2), PROGRAM, engine, str(out)]
        done = run_script(command, env=mpi_environ(), timeout=150)
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


def measure(title: str, start: Start, rounds: int) -> list[Comparison]:
    """Each engine in runs of its own, in turn; one comparison for each row that was measured."""
    taken: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for engine in ENGINES if number % 2 == 0 else reversed(ENGINES):
                print(f"{title}: {engine}, round {number + 1} of {rounds}", flush=True)
                out = Path(folder, "out.json")
                start(engine, out)
                for row, seconds in json.loads(out.read_text()).items():
                    taken.setdefault(row, {}).setdefault(engine, []).append(seconds)
    return [
        Comparison(f"{title}: {row}", samples, peer=PEER, at_most={"mpi4py": 1.0}) for row, samples in taken.items()
    ]


def run(quick: bool) -> Report:
    tables: list[Comparison] = []
    notes: list[str] = []
    for kind, name in NAMES.items():
        if reason := why_no(kind):
            notes.append(f"{name}: {reason}.")
        else:
            tables += measure(f"{name}, 2 ranks, one host", on_one_host(kind), 1 if quick else 3)
    if reason := why_not():
        notes.append(f"Two hosts: {reason}.")
    elif not quick:
        with Cluster() as cluster:
            tables += measure("Open MPI, two hosts of 2 ranks", on_two_hosts(cluster), 1)
    notes += [
        "DDP steps: an MLP of 10 layers of 1024 x 1024 (10.5 M parameters), 1 thread per rank, gradients"
        " as bucket views.",
        "The two hosts are network namespaces of this machine with a virtual cable between them.",
    ]
    return Report("DDP steps over mpi4py against gloo", tables, notes)
