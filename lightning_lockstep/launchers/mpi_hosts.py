"""The hosts of an mpirun: named in a hostfile, reached by ssh, looked at before anything starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from lightning_lockstep._system import run_program
from lightning_lockstep._text import counted, plain_table
from lightning_lockstep.distributed.rendezvous import addresses_here, addresses_of
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpirun_command import (
    MPIRun,
    MPIRunSettings,
    hostname_command,
    mpirun_environ,
)

# -- Commands that run something on another host by ssh, without a password and without a question --

#: Longest wait for ssh to connect [s].
CONNECT = 6
#: Longest wait for Python to answer there [s].
ANSWER = 40
#: Exit code of ssh where it did not get to the host.
SSH_FAILED = 255
#: What is said of all hosts where this one has no ssh.
NO_SSH = "there is no ssh command on this host"


def is_this_host(name: str) -> bool:
    """Return whether a host of a hostfile is the one on which this process runs, to which no ssh is needed."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    here = addresses_here()
    return any(address in here or ip_address(address).is_loopback for address in addresses_of(name))


def python_on(host: str, arguments: Sequence[str], ssh_args: Sequence[str] = ()) -> list[str]:
    """Return the command that runs this Python on a host, in the folder and with the search path of here."""
    if is_this_host(host):
        return [sys.executable, *arguments]
    path = os.environ.get("PYTHONPATH", "")
    python = f"PYTHONPATH={shlex.quote(path)} {shlex.quote(sys.executable)} {shlex.join(arguments)}"
    line = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; {python}"
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}"]
    return ["ssh", *options, *ssh_args, "--", host, line]


# -- The hosts of a hostfile, as Open MPI and MPICH read it --

_EXPECTED = "Expected lines such as 'node1 slots=4' (Open MPI) or 'node1:4' (MPICH)."
# ssh and mpirun would take a name that begins with a dash for an option.
_NAME = re.compile(r"[\w\[][\w.:@%\[\]-]*")


@dataclass(frozen=True)
class Host:
    """A line of a hostfile."""

    name: str
    slots: int | None = None  # how many ranks it takes; None: the file does not say


def read_hostfile(path: Path, given: str = "The hostfile") -> list[Host]:  # given: how, for messages
    """Return the hosts of a hostfile of Open MPI (``node1 slots=4``) or MPICH (``node1:4``)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"hostfile {path}: it cannot be read ({error}). {_EXPECTED}") from error
    hosts = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        name, count = _name_and_count(words[0])
        slots = re.search(r"\bslots\s*=\s*(\d+)", line)
        hosts.append(Host(name, int(slots[1]) if slots else int(count) if count.isdigit() else None))
    if wrong := [host.name for host in hosts if not is_host_name(host.name)]:
        raise LaunchError(
            f"{given} has lines that do not begin with the name or address of a host:"
            f" {', '.join(map(repr, wrong))}. {_EXPECTED}"
        )
    return hosts


def _name_and_count(word: str) -> tuple[str, str]:
    """Part ``host:slots``; an address of IPv6 has colons itself, and is followed by slots only in brackets."""
    if word.startswith("["):
        name, _, rest = word[1:].partition("]")
        return name, rest.removeprefix(":")
    name, _, count = word.partition(":")
    return (word, "") if ":" in count else (name, count)


def is_host_name(name: str) -> bool:
    """Return whether something can be the name or address of a host."""
    return _NAME.fullmatch(name) is not None


# -- The hosts of a hostfile, and whether ranks can be started on them: checked in seconds, before anything
# starts
#
# Each host must accept ssh without a password, have the same Python and the same packages, and let mpirun
# start a process there. All hosts are asked at once; what is wrong comes as one table with what to do.

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
    hosts = read_hostfile(Path(settings.hostfile), f"hostfile={str(settings.hostfile)!r}")[:num_nodes]
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
        return ssh_fault(report)[0]
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


def ssh_fault(report: HostReport) -> tuple[str, list[str]]:
    """Return why ssh does not get to a host and what to do about it, and the lines to paste for that."""
    host, error = report.host, report.ssh.lower()
    if report.ssh == NO_SSH:
        return NO_SSH, ["sudo apt install openssh-client"]
    if "resolve" in error or "name or service" in error:
        why = "its name does not resolve: correct the hostfile, or add the host to DNS or /etc/hosts"
        return why, [f"echo 'ADDRESS {host}' | sudo tee -a /etc/hosts"]
    if "permission denied" in error:
        why = f"it wants a password: run `ssh-copy-id {host}`, then try `ssh {host} true`"
        return why, [f"ssh-copy-id {host}", f"ssh -o BatchMode=yes {host} true"]
    if "host key" in error:
        why = f"its host key is not known: run `ssh {host} true` once and accept it"
        return why, [f"ssh {host} true  # once, and accept its key"]
    if "refused" in error:
        why = f"nothing listens for ssh there: start sshd, or give its port in ssh_args ({report.ssh})"
        return why, [f"sudo systemctl start sshd  # on {host}"]
    return f"ssh does not connect: {report.ssh}", [f"ssh -v {host} true"]


def host_fix(report: HostReport) -> list[str]:
    """Return the lines to paste for a host that is not ready."""
    if report.ssh in ("ok", "local"):
        return [f"# on {report.host}, in an environment at the same path:", "pip install lightning-lockstep"]
    return ssh_fault(report)[1]


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
    """Return the report of the host of this process."""
    return ask_host("localhost", ())


def ask_host(host: str, ssh_args: Sequence[str]) -> HostReport:
    """Ask a host, by ssh if it is another one."""
    # `python -c` finds what lies in its folder; the program does so only when it is run with `python -m`.
    from_folder = any(place in ("", str(Path.cwd())) for place in sys.path)
    probe = _PROBE.format(names=_PACKAGES, from_folder=from_folder, daemons=_DAEMONS)
    command = python_on(host, ["-c", probe], ssh_args)
    is_here = command[0] == sys.executable
    if shutil.which(command[0]) is None:  # 127 may be the exit code of the shell there
        return HostReport(host, NO_SSH)
    answer = run_program(command, CONNECT + ANSWER)
    if answer.timed_out:
        return HostReport(host, f"no answer within {CONNECT + ANSWER} s")
    errors = [
        line
        for line in answer.error.splitlines()
        if line.strip() and not line.startswith("Warning: Permanently")
    ]
    if answer.returncode == SSH_FAILED:
        return HostReport(host, errors[-1] if errors else "no connection")
    for line in answer.output.splitlines():
        if line.startswith("LOCKSTEP"):
            python, versions, daemon, cores = json.loads(line.removeprefix("LOCKSTEP"))
            found = {name: version for name, version in versions.items() if version is not None}
            return HostReport(host, "local" if is_here else "ok", python, found, daemon, cores)
    why = errors[-1] if errors else "no output"
    return HostReport(host, "ok", f"{sys.executable} does not run there: {why}")


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
