"""Commands that run something on another host by ssh, without a password and without a question."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from lightning_lockstep.distributed.interfaces import addresses_here, addresses_of

__all__ = ["ANSWER", "CONNECT", "is_this_host", "python_on", "remote_python", "ssh_command"]

#: Longest wait for ssh to connect [s].
CONNECT = 6
#: Longest wait for Python to answer there [s].
ANSWER = 40


def is_this_host(name: str) -> bool:
    """Return whether a host of a hostfile is the one on which this process runs, to which no ssh is needed."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    here = addresses_here()
    return any(address in here or ip_address(address).is_loopback for address in addresses_of(name))


def python_on(
    host: str, arguments: Sequence[str], ssh_args: Sequence[str] = (), *, first: str = ""
) -> list[str]:
    """Return the command that runs this Python on a host, which may be this one."""
    if is_this_host(host):
        return [sys.executable, *arguments]
    line = remote_python(arguments)
    # The word comes after all that the shell of that host prints by itself.
    return ssh_command(host, f"echo {shlex.quote(first)}; {line}" if first else line, ssh_args)


def ssh_command(host: str, remote: str, ssh_args: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a line of shell on a host."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}"]
    return ["ssh", *options, *ssh_args, "--", host, remote]


def remote_python(arguments: Sequence[str]) -> str:
    """Return the line of shell that runs this Python there, in the folder and with the search path of here."""
    path = os.environ.get("PYTHONPATH", "")
    python = f"PYTHONPATH={shlex.quote(path)} {shlex.quote(sys.executable)} {shlex.join(arguments)}"
    return f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; {python}"
