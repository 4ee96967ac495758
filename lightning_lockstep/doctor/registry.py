"""Which checks there are: those of this package, and those that other packages add by an entry point."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from lightning_lockstep._settings import did_you_mean
from lightning_lockstep.doctor.findings import Finding
from lightning_lockstep.doctor.machines.machine import Machine
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.errors import ConfigurationError

__all__ = [
    "BUILT_IN",
    "ENTRY_POINTS",
    "NOT_BY_DEFAULT",
    "Check",
    "CheckFunction",
    "check",
    "check_names",
    "load_check",
]

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
    """Import a check and return it."""
    if name not in BUILT_IN and name not in _entry_points():
        names = check_names()
        hint = did_you_mean(name, names)
        raise ConfigurationError(f"check {name!r}: expected one of {', '.join(names)}.{hint}")
    if name in BUILT_IN:
        importlib.import_module(f"lightning_lockstep.doctor.checks.{name}")
    elif name not in _registered:
        _load_entry_point(name)
    return _registered[name]


def _load_entry_point(name: str) -> None:
    value = _entry_points()[name]
    module = value.partition(":")[0].strip()
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ConfigurationError(
            f"check {name!r}: its entry point {value!r} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    if name not in _registered:
        raise ConfigurationError(
            f"check {name!r}: its entry point {value!r} registers no check of that name;"
            f" expected a function under @lightning_lockstep.doctor.check(name={name!r}, ...)."
        )


@cache
def _entry_points() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
