"""MPI tested on ranks that an mpirun of the doctor starts on this host."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_lockstep._text import exit_in_words, ranges, time_in_words
from lightning_lockstep.doctor import probes
from lightning_lockstep.doctor.findings import Finding, not_applicable, ok, problem
from lightning_lockstep.doctor.machines.machine import Completed, Machine
from lightning_lockstep.doctor.network.report import first_part, rate
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpirun.command import (
    MPIRunSettings,
    find_mpirun,
    mpirun_command,
    mpirun_environ,
)

__all__ = ["mpi_here"]

_LONGEST = 90.0  # for all steps [s]
_LAST_STEP = "speed"


def mpi_here(machine: Machine, count: int) -> Finding:
    """Return how a test with ranks of mpirun on this host went."""
    settings = MPIRunSettings()
    if "mpi4py" not in machine.python.packages:
        return not_applicable("mpi4py", "it is not installed; strategy=mpi needs it")
    try:
        mpirun = find_mpirun(settings)
    except LaunchError as error:
        return problem("mpi4py", str(error))
    if mpirun is None:
        return not_applicable("mpi4py", "no mpirun was found beside this Python or in PATH")
    command = mpirun_command(mpirun, settings, num_processes=count, num_nodes=1)
    command = [argument for argument in command if argument not in ("--output", "tag")]
    probe = str(Path(str(probes.__path__[0]), "network_mpi.py"))
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    given = [f"{name}={value}" for name, value in mpirun_environ(settings).items() if name in names]
    done = machine.run(["env", *given, *command, sys.executable, "-u", probe, "--all"], timeout=_LONGEST)
    return _finding(done, count)


def _finding(done: Completed, count: int) -> Finding:
    answers: dict[int | None, dict[str, Mapping[str, Any]]] = {}
    for line in done.output.splitlines():
        with suppress(ValueError):
            answer = json.loads(line[max(line.find("{"), 0) :])
            answers.setdefault(answer.get("answering"), {})[str(answer.get("step"))] = answer
    faults = [
        (rank, step, answer.get("error"))
        for rank, steps in answers.items()
        for step, answer in steps.items()
        if not answer.get("ok")
    ]
    if faults:
        rank, step, error = faults[0]
        return problem(f"mpi4py: {step}", f"rank {rank}: {error}")
    first = answers.get(0, {})
    sizes = {int(steps["start"].get("size", 0)) for steps in answers.values() if "start" in steps}
    if sizes - {count}:
        library = first.get("start", {}).get("library")
        return problem(
            "mpi4py: start",
            f"mpirun started {count} ranks, but MPI sees {', '.join(map(str, sorted(sizes)))}: mpi4py loads another MPI"
            f" ({library}) than the one that starts the ranks",
            "lockstep-doctor mpi",
        )
    if _LAST_STEP not in first:
        missing = [rank for rank in range(count) if "start" not in answers.get(rank, {})]
        tail = [line for line in done.error.splitlines() if line.strip(" -")]
        what = f"no answer within {_LONGEST:.0f} s" if done.timed_out else exit_in_words(done.returncode)
        which = f"; ranks that did not start: {ranges(missing)}" if missing else ""
        last = next(reversed(first), "start")
        return problem("mpi4py", f"{what}, after the step {last!r} of rank 0{which}. {' '.join(tail[-2:])}")
    speed, start = first[_LAST_STEP], first["start"]
    return ok(
        "mpi4py",
        f"{count} ranks with {first_part(start['library'])}: barrier and all-reduce correct; 8 bytes take"
        f" {time_in_words(speed['latency'])}, 16 MB go at {rate(speed['bandwidth'])}",
    )
