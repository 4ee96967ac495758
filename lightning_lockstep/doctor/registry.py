"""What a check is: its options, what it returns, and the checks there are."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.errors import ConfigurationError

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
    """One thing that a check has looked at.

    Attributes:
        status: The result.
        subject: What was looked at, in a few words, such as ``toolkit on PATH``.
        evidence: What was seen, and what that means; for ``NOT_APPLICABLE`` why it does not matter here.
        fix: Lines to paste into a shell. A line that begins with ``#`` is a remark for the reader.
    """

    status: Status
    subject: str
    evidence: str
    fix: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it in types that JSON has."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Return what :meth:`to_json` has written; raises KeyError or ValueError otherwise."""
        fix = tuple(map(str, data["fix"]))
        return cls(Status(data["status"]), str(data["subject"]), str(data["evidence"]), fix)


@dataclass(frozen=True)
class CheckResult:
    """All that one check has found, in the order in which it is shown, never empty; and how long it took [s]."""

    check: str
    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """The worst status of its findings."""
        return worst(finding.status for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return it in types that JSON has."""
        return {
            "check": self.check,
            "status": self.status.value,
            "seconds": round(self.seconds, 3),
            "findings": [finding.to_json() for finding in self.findings],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckResult:
        """Return what :meth:`to_json` has written; raises KeyError or ValueError otherwise."""
        findings = tuple(Finding.from_json(finding) for finding in data["findings"])
        return cls(data["check"], findings, data["seconds"])


def ok(subject: str, evidence: str) -> Finding:
    """Return a finding that needs nothing done."""
    return Finding(Status.OK, subject, evidence)


def warning(subject: str, evidence: str, *fix: str) -> Finding:
    """Return a finding with which a run may do badly."""
    return Finding(Status.WARNING, subject, evidence, fix)


def problem(subject: str, evidence: str, *fix: str) -> Finding:
    """Return a finding with which a run that needs this cannot succeed."""
    return Finding(Status.PROBLEM, subject, evidence, fix)


def not_applicable(subject: str, why: str) -> Finding:
    """Return a finding for what this machine does not have."""
    return Finding(Status.NOT_APPLICABLE, subject, why)


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of several statuses, ``NOT_APPLICABLE`` of none."""
    return max(statuses, key=lambda status: status.severity, default=Status.NOT_APPLICABLE)


# -- What a user has asked of the checks --


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of the command line that checks look at.

    Attributes:
        timeout: Longest time that a check may take [s]; ``None`` for the check's default.
        nproc: Ranks that a check starts on this host; ``None`` for the check's default.
        hosts: Names of the hosts of the run, as ``mpirun --host`` takes them.
        hostfile: File with the hosts of the run.
        ssh_args: Arguments for ssh, such as ``-p 2222``.
        folders: Run folders to look at.
        model_parameters: Parameters of the model that is to be trained, for estimates of memory.
        gpus: GPUs for which that is estimated; ``None`` for those of this host.
        strategy: Name of the strategy that is about to run; ``None`` outside a run.
    """

    timeout: float | None = None
    nproc: int | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str | None = None
    ssh_args: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    model_parameters: float | None = None
    gpus: int | None = None
    strategy: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return them in types that JSON has."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckOptions:
        """Return what :meth:`to_json` has written."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)


# -- Which checks there are: those of this package, and those that other packages add by an entry point --

#: Entry point group by which other packages add checks: the name of the check, and its function.
ENTRY_POINTS = "lightning_lockstep.doctor_checks"

#: The checks of this package, each in a module of its name, with its summary, quick ones first. This table is what
#: ``--help`` shows without importing them.
BUILT_IN: dict[str, str] = {
    "packages": "versions that do not go together, limits of memory, CPU, open files and shared memory",
    "kernel": "Linux before 5.5, on which ranks may hang",
    "cuda": "driver, torch's CUDA, toolkits of the system and which one is found, host compiler, architectures",
    "xla": "PJRT device, runtime against torch, deprecated variables",
    "deepspeed": "importable, operations built or buildable (link tests), stale build locks, memory per stage",
    "devices": "unequal GPUs: memory, capability, clocks, link, NUMA, measured speed; all ranks on device 0",
    "mpi": "mpirun and mpi4py of one MPI; ssh, versions and slots of the hosts",
    "slurm": "allocation, tasks per node, srun, MPI types, time limit and signal",
    "network": "ranks connect and communicate: gloo, nccl, mpi4py, stage by stage",
    "run": "run folders: what happened, and what to do next",
}

#: Checks that only run when they are named.
NOT_BY_DEFAULT = ("network", "run")

CheckFunction = Callable[[Machine, CheckOptions], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """A registered check."""

    name: str
    summary: str
    why: str  # that matters, for ``--explain``
    function: CheckFunction
    needs_ranks: bool = False  # starts ranks or measures speed: runs alone, after the others
    timeout: float = 30.0  # [s]


_registered: dict[str, Check] = {}


def check(
    *,
    name: str,
    summary: str,
    why: str,
    needs_ranks: bool = False,
    timeout: float = 30.0,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as a check.

    Args:
        name: As users type it.
        summary: What it looks at, in one line.
        why: Why that matters, for ``--explain``.
        needs_ranks: Whether it starts ranks or measures speed, and so runs alone, after the others.
        timeout: Longest time that it may take [s].
    """

    def register(function: CheckFunction) -> CheckFunction:
        _registered[name] = Check(name, summary, why, function, needs_ranks, timeout)
        return function

    return register


def check_names() -> list[str]:
    """Return the names of all checks, those of others after those of this package."""
    return [*BUILT_IN, *(name for name in _entry_points() if name not in BUILT_IN)]


def load_check(name: str) -> Check:
    """Import a check, of :func:`check_names`, and return it."""
    if name in BUILT_IN:
        importlib.import_module(f"lightning_lockstep.doctor.checks.{name}")
        return _registered[name]
    point = _entry_points()[name]
    try:
        importlib.import_module(point.module)
    except Exception as error:
        raise ConfigurationError(
            f"check {name!r}: its entry point {point.value!r} cannot be imported"
            f" ({type(error).__name__}: {error})."
        ) from error
    if name not in _registered:
        raise ConfigurationError(
            f"check {name!r}: its entry point {point.value!r} registers no check of that name;"
            f" expected a function under @lightning_lockstep.doctor.check(name={name!r}, ...)."
        )
    return _registered[name]


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
