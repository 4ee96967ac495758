"""What a check returns, its options, and the checks there are."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.mpirun_command import read_hostfile

# -- What a check has found: its status, the evidence, and the commands that fix it --


class Status(str, enum.Enum):
    """How a finding stands, from the best to the worst."""

    NOT_APPLICABLE = "not applicable"
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def severity(self) -> int:
        """Its place in the order, 0 for the best."""
        return list(Status).index(self)


@dataclass(frozen=True)
class Finding:
    """One thing that a check has looked at."""

    status: Status
    subject: str  # what was looked at, in a few words, such as ``toolkit on PATH``
    evidence: str  # what was seen, and what that means; for ``NOT_APPLICABLE`` why it does not matter here
    fix: tuple[str, ...] = ()  # lines to paste into a shell; one that begins with ``#`` is a remark


@dataclass(frozen=True)
class CheckResult:
    """All that one check has found, in the order in which it is shown, never empty; and how long it took [s]."""

    check: str
    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        return worst(finding.status for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status.value, "seconds": round(self.seconds, 3)}


def ok(subject: str, evidence: str, *may: str) -> Finding:
    """Return a finding that needs nothing done; ``may``: lines to paste that are optional."""
    return Finding(Status.OK, subject, evidence, may)


def warning(subject: str, evidence: str, *fix: str) -> Finding:
    """Return a finding with which a run may do badly."""
    return Finding(Status.WARNING, subject, evidence, fix)


def problem(subject: str, evidence: str, *fix: str) -> Finding:
    """Return a finding with which a run that needs this cannot succeed."""
    return Finding(Status.PROBLEM, subject, evidence, fix)


def not_applicable(subject: str, why: str) -> Finding:
    return Finding(Status.NOT_APPLICABLE, subject, why)


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of several statuses, ``NOT_APPLICABLE`` of none."""
    return max(statuses, key=lambda status: status.severity, default=Status.NOT_APPLICABLE)


# -- What a user has asked of the checks --


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of the command line that checks look at, and what the run is like that they precede."""

    timeout: float | None = None  # longest time that a check may take [s]; None: the check's own
    nproc: int | None = None  # ranks that `network` starts on this host
    hostfile: str | None = None  # of an mpirun
    ssh_args: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()  # of runs
    model_parameters: float | None = None  # for which memory is estimated
    gpus: int | None = None  # for which that is estimated; None: those of this host
    backends: tuple[str, ...] = ("gloo", "nccl", "mpi4py")  # that it tests
    ranks: Any = None  # of the job that torchrun, mpirun or srun has started; None: `network` starts its own


def hosts_of(options: CheckOptions) -> list[str]:
    """Return the hosts that ``--hostfile`` names; none for this host alone."""
    if options.hostfile is None:
        return []
    try:
        listed = read_hostfile(Path(options.hostfile))
    except LaunchError as error:
        raise ConfigurationError(str(error)) from error
    if not listed:
        raise ConfigurationError(f"--hostfile {options.hostfile}: expected a host on each line.")
    return listed


# -- Which checks there are --


@dataclass(frozen=True)
class Check:
    """A check: the function ``check`` of the module of its name."""

    summary: str
    timeout: float = 60.0  # [s]
    runs_alone: bool = False  # after the others, because it starts ranks or measures speed


#: The checks, quick ones first.
CHECKS = {
    "packages": Check("versions that do not go together; limits of memory, CPU, open files, shared memory"),
    "kernel": Check("Linux before 5.5, on which ranks may hang"),
    "cuda": Check("driver, torch's CUDA, toolkits and which one is found, host compiler, architectures"),
    "xla": Check("PJRT device, runtime against torch, deprecated variables"),
    "deepspeed": Check("importable, operations built or buildable, stale build locks, memory per stage"),
    "devices": Check("GPUs that differ in memory, capability, speed; all ranks on device 0", runs_alone=True),
    "mpi": Check("mpirun and mpi4py of one MPI; ssh to the hosts, and mpirun on them", timeout=150.0),
    "slurm": Check("allocation, tasks per node, srun, MPI types, time limit and signal", timeout=90.0),
    "network": Check("ranks connect over gloo, nccl, mpi4py, step by step", timeout=600.0, runs_alone=True),
    "run": Check("run folders: what happened, and what to do next"),
}

#: Checks that only run when they are named.
NOT_BY_DEFAULT = ("network", "run")


def function_of(name: str) -> Callable[[Any, CheckOptions], Iterator[Finding]]:
    module = importlib.import_module(f"lightning_lockstep.doctor.checks.{name}")
    check: Callable[[Any, CheckOptions], Iterator[Finding]] = module.check
    return check
