"""The hosts of a hostfile, and whether ranks can be started on them: checked in seconds, before anything starts.

Each host must accept ssh without a password, have the same Python and the same packages, and let mpirun start
a process there. All hosts are asked at once; what is wrong comes as one table with what to do.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from lightning_lockstep._processes import run_program
from lightning_lockstep._tables import plain_table
from lightning_lockstep._text import counted
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpirun.command import (
    MPIRun,
    MPIRunSettings,
    hostname_command,
    mpirun_environ,
)
from lightning_lockstep.launchers.mpirun.hostfile import Host, checked_hosts, read_hostfile
from lightning_lockstep.launchers.mpirun.remote import (
    ANSWER,
    CONNECT,
    is_this_host,
    remote_python,
    ssh_command,
)

__all__ = [
    "Host",
    "HostReport",
    "ask_host",
    "check_hosts",
    "host_advice",
    "host_fix",
    "hosts_fault",
    "hosts_for",
    "mpirun_fault",
    "read_hostfile",
    "ssh_advice",
    "this_host",
]

_MPIRUN = 40  # longest wait for `mpirun hostname` [s]
# What mpirun starts on each host: Open MPI 5, Open MPI 4, MPICH.
_DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
_PACKAGES = ("torch", "lightning", "pytorch-lightning", "mpi4py")


@dataclass(frozen=True)
class HostReport:
    """What a check of one host has found."""

    host: str
    ssh: str  # ``ok``, ``local``, or the error of ssh
    python: str = ""  # version of Python there, or what went wrong
    packages: Mapping[str, str] | None = None  # versions of those that must agree
    daemon: str = ""  # mpirun's, as a shell there that is not interactive finds it; empty for none
    cores: int | None = None


def hosts_for(settings: MPIRunSettings, *, num_processes: int, num_nodes: int) -> list[Host]:
    """Return the hosts to start ranks on; none without a hostfile, for this host alone."""
    if settings.hostfile is None:
        if num_nodes > 1:
            raise LaunchError(
                f"num_nodes={num_nodes} was given, but no hostfile: expected hostfile=... with {num_nodes} hosts"
                f" of {num_processes} slots each, or ranks that are started by mpirun or srun."
            )
        return []
    hosts = read_hostfile(Path(settings.hostfile))
    checked_hosts(hosts, f"hostfile={str(settings.hostfile)!r}")
    hosts = hosts[:num_nodes]
    if len(hosts) < num_nodes or any(host.slots is not None and host.slots < num_processes for host in hosts):
        rows = [(host.name, "not given" if host.slots is None else host.slots) for host in hosts]
        raise LaunchError(
            f"The Trainer wants {counted(num_nodes, 'node')} with {num_processes} ranks each, but the hostfile"
            f" {settings.hostfile} does not have them:\n\n{plain_table(('host', 'slots'), rows)}\n\n"
            "Add hosts or slots to it, or lower devices or num_nodes."
        )
    return hosts


def check_hosts(hosts: Sequence[Host], mpirun: MPIRun, settings: MPIRunSettings) -> None:
    """Make sure that ranks can be started on all hosts; asking takes as long as the slowest, at most 46 s."""
    with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
        reports = list(pool.map(lambda host: ask_host(host.name, settings.ssh_args), hosts))
    fault = hosts_fault(reports, this_host()) or mpirun_fault(hosts, mpirun, settings)
    if fault is not None:
        raise LaunchError(fault)


def hosts_fault(reports: Sequence[HostReport], here: HostReport) -> str | None:
    """Return a table of the hosts with what to do about each, or ``None`` when all are ready."""
    advice = [host_advice(report, here) for report in reports]
    if not any(advice):
        return None
    rows = []
    for report, todo in zip(reports, advice, strict=True):
        ssh = report.ssh if report.ssh in ("ok", "local") else "failed"
        python = report.python if report.packages is not None else "" if ssh == "failed" else "failed"
        rows.append((report.host, ssh, python, todo or "ready"))
    table = plain_table(("host", "ssh", "python", "what to do"), rows)
    return f"Not every host is ready to run ranks:\n\n{table}"


def host_advice(report: HostReport, here: HostReport) -> str:
    """Return what to do about a host, or nothing where it is ready."""
    if report.ssh not in ("ok", "local"):
        return ssh_advice(report)
    if report.packages is None:
        return report.python
    if report.python != here.python:
        return f"Python {report.python} there, {here.python} here: use the same environment on all hosts"
    theirs, ours = report.packages, here.packages or {}
    different = [
        f"{name} {theirs.get(name) or 'missing'} there, {version} here"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]
    return f"install the same versions: {'; '.join(different)}" if different else ""


def ssh_advice(report: HostReport) -> str:
    """Return why ssh does not get to a host, and what to do about it."""
    error = report.ssh.lower()
    if "resolve" in error or "name or service" in error:
        return "its name does not resolve: correct the hostfile, or add the host to DNS or /etc/hosts"
    if "permission denied" in error:
        return f"it wants a password: run `ssh-copy-id {report.host}`, then try `ssh {report.host} true`"
    if "host key" in error:
        return f"its host key is not known: run `ssh {report.host} true` once and accept it"
    if "refused" in error:
        return f"nothing listens for ssh there: start sshd, or give its port in ssh_args ({report.ssh})"
    return f"ssh does not connect: {report.ssh}"


def host_fix(report: HostReport) -> list[str]:
    """Return the lines to paste for a host that is not ready."""
    error = report.ssh.lower()
    if "no module named" in error:
        error = "ok"
    if "permission denied" in error:
        return [f"ssh-copy-id {report.host}", f"ssh -o BatchMode=yes {report.host} true"]
    if "host key" in error:
        return [f"ssh {report.host} true  # once, and accept its key"]
    if "resolve" in error or "name or service" in error:
        return [f"echo 'ADDRESS {report.host}' | sudo tee -a /etc/hosts"]
    if "refused" in error:
        return [f"sudo systemctl start sshd  # on {report.host}"]
    if error in ("ok", "local"):
        return [f"# on {report.host}, in an environment at the same path:", "pip install lightning-lockstep"]
    return [f"ssh -v {report.host} true"]


_PROBE = """
import importlib.util, json, os, platform, shutil, sys
from importlib import metadata
if not {from_folder!r}: sys.path[:] = [place for place in sys.path if place]
versions = {{}}
for name in {names!r}:
    try: versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError: versions[name] = None
found = importlib.util.find_spec("lightning_lockstep")
versions["lightning_lockstep"] = "installed" if found and found.origin else None
daemon = next(filter(None, map(shutil.which, {daemons!r})), "")
print("LOCKSTEP" + json.dumps([platform.python_version(), versions, daemon, os.cpu_count()]))
"""


def this_host() -> HostReport:
    """Return the report of this process."""
    versions = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    daemon = next(filter(None, map(shutil.which, _DAEMONS)), "")
    versions["lightning_lockstep"] = "installed"
    return HostReport("here", "local", sys.version.split()[0], versions, daemon, os.cpu_count())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def ask_host(host: str, ssh_args: Sequence[str]) -> HostReport:
    """Ask a host by ssh."""
    if is_this_host(host):
        return replace(this_host(), host=host)
    # `python -c` finds what lies in its folder; the program does so only when it is run with `python -m`.
    from_folder = any(place in ("", str(Path.cwd())) for place in sys.path)
    probe = _PROBE.format(names=_PACKAGES, from_folder=from_folder, daemons=_DAEMONS)
    command = ssh_command(host, remote_python(["-c", probe]), ssh_args)
    if shutil.which(command[0]) is None:
        return HostReport(host, "there is no ssh command on this host")
    answer = run_program(command, CONNECT + ANSWER)
    if answer.timed_out:
        return HostReport(host, f"no answer within {CONNECT + ANSWER} s")
    errors = [
        line
        for line in answer.error.splitlines()
        if line.strip() and not line.startswith("Warning: Permanently")
    ]
    if answer.returncode == 255:
        return HostReport(host, errors[-1] if errors else "no connection")
    for line in answer.output.splitlines():
        if line.startswith("LOCKSTEP"):
            python, versions, daemon, cores = json.loads(line.removeprefix("LOCKSTEP"))
            return HostReport(host, "ok", python, versions, daemon, cores)
    return HostReport(
        host, "ok", f"{sys.executable} does not run there: {errors[-1] if errors else 'no output'}"
    )


def mpirun_fault(hosts: Sequence[Host], mpirun: MPIRun, settings: MPIRunSettings) -> str | None:
    """Let mpirun print the name of every host from there; return what is wrong, or ``None``."""
    command = hostname_command(mpirun, [host.name for host in hosts], settings.ssh_args)
    answer = run_program(command, _MPIRUN, mpirun_environ(settings))
    if answer.timed_out:
        return (
            f"`{' '.join(command)}` gave no answer within {_MPIRUN} s, though ssh works: the hosts must reach"
            " each other on all ports, not only ssh's. Open the firewall between them."
        )
    if answer.returncode or len(answer.output.split()) < len(hosts):
        output = "\n".join(line for line in (answer.output + answer.error).splitlines() if line.strip("- "))
        return f"`{' '.join(command)}` failed with exit code {answer.returncode}:\n\n{output[-1500:]}"
    return None
