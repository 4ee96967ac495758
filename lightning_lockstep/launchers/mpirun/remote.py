"""Commands that run something on another host by ssh, without a password and without a question."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CONNECT", "ANSWER", "remote_python", "ssh_command"]

#: Longest wait for ssh to connect [s].
CONNECT = 6
#: Longest wait for Python to answer there [s].
ANSWER = 40


def ssh_command(host: str, remote: str, ssh_args: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a line of shell on a host.

    Args:
        host: Its name.
        remote: The line.
        ssh_args: Arguments for ssh.
    """
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}"]
    return ["ssh", *options, *ssh_args, "--", host, remote]


def remote_python(arguments: Sequence[str]) -> str:
    """Return the line of shell that runs this Python there, in the folder and with the search path of here.

    Args:
        arguments: Of Python.
    """
    path = os.environ.get("PYTHONPATH", "")
    python = f"PYTHONPATH={shlex.quote(path)} {shlex.quote(sys.executable)} {shlex.join(arguments)}"
    return f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; {python}"
