"""The hosts of a hostfile, and whether ranks can be started on them: checked in seconds, before anything starts.

Each host must accept ssh without a password, have the same Python and the same packages, and let mpirun start
a process there. All hosts are asked at once; what is wrong comes as one table with what to do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lightning_lockstep._tables import plain_table
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpirun.command import (
    MPIRun,
    MPIRunSettings,
    hostname_command,
    mpirun_environ,
)

__all__ = ["Host", "HostReport", "check_hosts", "hosts_fault", "hosts_for", "read_hostfile"]

_CONNECT = 6  # longest wait for ssh to connect [s]
_ANSWER = 40  # longest wait for Python to answer there [s]
_MPIRUN = 40  # longest wait for `mpirun hostname` [s]
# ssh and mpirun would take a name that begins with a dash for an option.
_NAME = re.compile(r"[\w\[][\w.:@%\[\]-]*")
_PACKAGES = ("torch", "lightning", "pytorch-lightning", "mpi4py")


@dataclass(frozen=True)
class Host:
    """A line of a hostfile.

    Attributes:
        name: Host name or address.
        slots: How many ranks it takes; ``None`` when the file does not say.
    """

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class HostReport:
    """What a check of one host has found.

    Attributes:
        host: Its name.
        ssh: ``ok``, ``local``, or the error of ssh.
        python: Version of Python there, or what went wrong.
        packages: Versions of the packages that must agree.
    """

    host: str
    ssh: str
    python: str = ""
    packages: Mapping[str, str] | None = None


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a hostfile of Open MPI (``node1 slots=4``) or MPICH (``node1:4``)."""
    hosts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        name, count = _name_and_count(words[0])
        slots = re.search(r"\bslots\s*=\s*(\d+)", line)
        hosts.append(Host(name, int(slots[1]) if slots else int(count) if count.isdigit() else None))
    return hosts


def _name_and_count(word: str) -> tuple[str, str]:
    """Part ``host:slots``; an address of IPv6 has colons of its own, and is followed by slots only in brackets."""
    if word.startswith("["):
        name, _, rest = word[1:].partition("]")
        return name, rest.removeprefix(":")
    name, _, count = word.partition(":")
    return (word, "") if ":" in count else (name, count)


def hosts_for(settings: MPIRunSettings, *, num_processes: int, num_nodes: int) -> list[Host]:
    """Return the hosts to start ranks on; none without a hostfile, for this host alone.

    Args:
        settings: What the user has set.
        num_processes: Number of ranks per node.
        num_nodes: Number of nodes.

    Raises:
        LaunchError: There are fewer hosts or slots than the Trainer wants, or something else where a host's name
            should be.
    """
    if settings.hostfile is None:
        if num_nodes > 1:
            raise LaunchError(
                f"num_nodes={num_nodes} was given, but no hostfile: expected hostfile=... with {num_nodes} hosts"
                f" of {num_processes} slots each, or ranks that are started by mpirun or srun."
            )
        return []
    hosts = read_hostfile(Path(settings.hostfile))
    if wrong := [host.name for host in hosts if not _NAME.fullmatch(host.name)]:
        raise LaunchError(
            f"hostfile={str(settings.hostfile)!r} has lines that do not begin with the name or address of a host:"
            f" {', '.join(map(repr, wrong))}. Expected lines such as 'node1 slots=4' (Open MPI) or 'node1:4' (MPICH)."
        )
    hosts = hosts[:num_nodes]
    if len(hosts) < num_nodes or any(host.slots is not None and host.slots < num_processes for host in hosts):
        rows = [(host.name, "not given" if host.slots is None else host.slots) for host in hosts]
        raise LaunchError(
            f"The Trainer wants {num_nodes} node(s) with {num_processes} ranks each, but the hostfile"
            f" {settings.hostfile} does not have them:\n\n{plain_table(('host', 'slots'), rows)}\n\n"
            "Add hosts or slots to it, or lower devices or num_nodes."
        )
    return hosts


def check_hosts(hosts: Sequence[Host], mpirun: MPIRun, settings: MPIRunSettings) -> None:
    """Make sure that ranks can be started on all hosts.

    Args:
        hosts: The hosts.
        mpirun: The mpirun that will start them.
        settings: What the user has set.

    Raises:
        LaunchError: With a table of what is wrong where, and what to do.

    Ranks: the process that starts the ranks; takes about as long as the slowest host, at most 46 s.
    """
    with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
        reports = list(pool.map(lambda host: _ask(host.name, settings.ssh_args), hosts))
    fault = hosts_fault(reports, _here()) or _mpirun_fault(hosts, mpirun, settings)
    if fault is not None:
        raise LaunchError(fault)


def hosts_fault(reports: Sequence[HostReport], here: HostReport) -> str | None:
    """Return a table of the hosts with what to do about each, or ``None`` when all are ready.

    Args:
        reports: One for each host.
        here: The same of this process.
    """
    advice = [_advice(report, here) for report in reports]
    if not any(advice):
        return None
    rows = []
    for report, todo in zip(reports, advice, strict=True):
        ssh = report.ssh if report.ssh in ("ok", "local") else "failed"
        python = report.python if report.packages is not None else "" if ssh == "failed" else "failed"
        rows.append((report.host, ssh, python, todo or "ready"))
    table = plain_table(("host", "ssh", "python", "what to do"), rows)
    return f"Not every host is ready to run ranks:\n\n{table}"


def _advice(report: HostReport, here: HostReport) -> str:
    if report.ssh not in ("ok", "local"):
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


_PROBE = """
import importlib.util, json, platform, sys
from importlib import metadata
if not {from_folder!r}: sys.path[:] = [place for place in sys.path if place]
versions = {{}}
for name in {names!r}:
    try: versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError: versions[name] = None
found = importlib.util.find_spec("lightning_lockstep")
versions["lightning_lockstep"] = "installed" if found and found.origin else None
print("LOCKSTEP" + json.dumps([platform.python_version(), versions]))
"""


def _here() -> HostReport:
    versions = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    return HostReport(
        "here", "local", sys.version.split()[0], {**versions, "lightning_lockstep": "installed"}
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _ask(host: str, ssh_args: Sequence[str]) -> HostReport:
    if host in ("localhost", "127.0.0.1", socket.gethostname()):
        return HostReport(host, "local", _here().python, _here().packages)
    path = os.environ.get("PYTHONPATH", "")
    # `python -c` finds what lies in its folder; the program does so only when it is run with `python -m`.
    from_folder = any(place in ("", str(Path.cwd())) for place in sys.path)
    probe = _PROBE.format(names=_PACKAGES, from_folder=from_folder)
    python = f"PYTHONPATH={shlex.quote(path)} {shlex.quote(sys.executable)} -c {shlex.quote(probe)}"
    remote = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; {python}"
    command = [
        "ssh",
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={_CONNECT}",
        *ssh_args,
        "--",
        host,
        remote,
    ]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_CONNECT + _ANSWER,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        return HostReport(host, "there is no ssh command on this host")
    except subprocess.TimeoutExpired:
        return HostReport(host, f"no answer within {_CONNECT + _ANSWER} s")
    errors = [
        line
        for line in answer.stderr.splitlines()
        if line.strip() and not line.startswith("Warning: Permanently")
    ]
    if answer.returncode == 255:
        return HostReport(host, errors[-1] if errors else "no connection")
    for line in answer.stdout.splitlines():
        if line.startswith("LOCKSTEP"):
            python, versions = json.loads(line.removeprefix("LOCKSTEP"))
            return HostReport(host, "ok", python, versions)
    return HostReport(
        host, "ok", f"{sys.executable} does not run there: {errors[-1] if errors else 'no output'}"
    )


def _mpirun_fault(hosts: Sequence[Host], mpirun: MPIRun, settings: MPIRunSettings) -> str | None:
    """Let mpirun print the name of every host from there; return what is wrong, or ``None``."""
    command = hostname_command(mpirun, [host.name for host in hosts], settings.ssh_args)
    try:
        answer = subprocess.run(
            command,
            env=mpirun_environ(settings),
            capture_output=True,
            text=True,
            timeout=_MPIRUN,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (
            f"`{' '.join(command)}` gave no answer within {_MPIRUN} s, though ssh works: the hosts must reach"
            " each other on all ports, not only ssh's. Open the firewall between them."
        )
    if answer.returncode or len(answer.stdout.split()) < len(hosts):
        output = "\n".join(line for line in (answer.stdout + answer.stderr).splitlines() if line.strip("- "))
        return f"`{' '.join(command)}` failed with exit code {answer.returncode}:\n\n{output[-1500:]}"
    return None
