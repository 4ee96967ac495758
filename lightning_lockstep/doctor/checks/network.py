"""Check ``network``: ranks that the doctor starts on this host; those of torchrun, mpirun and srun join instead."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress

from lightning_lockstep._text import exit_in_words, first_line
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.network import BACKENDS, Answer, ranks_here
from lightning_lockstep.doctor.network_findings import Trial, examine
from lightning_lockstep.doctor.probes import network_rank
from lightning_lockstep.doctor.registry import CheckOptions, Finding, not_applicable, problem
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpirun_command import (
    MPIRunSettings,
    find_mpirun,
    mpirun_command,
    mpirun_environ,
)


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Test the network between ranks of this host; the command has those of torchrun, mpirun and srun join."""
    count, backends = options.nproc or 2, options.backends or BACKENDS
    of_torch = [name for name in backends if name != "mpi4py"]
    if of_torch:
        try:
            ranks = ranks_here(count)
        except ImportError as error:
            evidence = f"torch cannot be imported: {first_line(error)}"
            yield problem("ranks", evidence, "lockstep-doctor packages")
            return
        try:
            yield from examine(ranks, of_torch)
        finally:
            ranks.end(0)
    if "mpi4py" in backends:
        yield _mpi_here(machine, count)


# -- MPI tested on ranks that an mpirun of the doctor starts on this host --

_LONGEST = 90.0  # for all steps [s]


def _mpi_here(machine: Machine, count: int) -> Finding:
    settings = MPIRunSettings()
    if "mpi4py" not in machine.python.packages:
        return not_applicable("mpi4py", "it is not installed; strategy=mpi needs it")
    try:
        mpirun = find_mpirun(settings)
    except LaunchError as error:
        return problem("mpi4py", str(error), "lockstep-doctor mpi")
    if mpirun is None:
        return not_applicable("mpi4py", "no mpirun was found next to this Python or in PATH")
    command = mpirun_command(mpirun, settings, num_processes=count, num_nodes=1)
    command = [argument for argument in command if argument not in ("--tag-output", "-l")]
    root = [
        f"{name}={value}" for name, value in mpirun_environ(settings).items() if "ALLOW_RUN_AS_ROOT" in name
    ]
    program = [sys.executable, "-u", network_rank.__file__, "mpi4py", str(count)]
    done = machine.run(["env", *root, *command, *program], timeout=_LONGEST)
    answers: dict[int, Answer] = {rank: {} for rank in range(count)}
    for line in done.output.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # what ranks and mpirun print
            answer = json.loads(line)
            answers[answer.pop("rank")][answer.pop("step")] = answer
    what = f"no answer within {_LONGEST:.0f} s" if done.timed_out else exit_in_words(done.returncode)
    tail = " ".join([line for line in done.error.splitlines() if line.strip(" -")][-2:])
    for steps in answers.values():
        if all(answer["ok"] for answer in steps.values()):
            for step in network_rank.MPIRank.steps:
                steps.setdefault(step, {"ok": False, "late": True, "error": f"{what}. {tail}"})
    return Trial("mpi4py", {machine.host: range(count)}, answers).finding()
