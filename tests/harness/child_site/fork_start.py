"""Has a rank that some launcher starts run as a fork of a process that has imported torch and Lightning already.

mpirun, torchrun, ``multiprocessing`` and the package itself start ranks as fresh interpreters, each of which spends
seconds of CPU on the same imports. An interpreter that starts as such a rank gives its arguments, environment and open
files to the fork server of the test process (``tests/harness/_server.py``); from then on it only passes signals on, and
ends as the fork ends. Where a fork could differ from a fresh process (other limits, namespaces, control group, or
variables that are read when a library is loaded), the interpreter goes on by itself.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any

#: The variable that brings ranks which a launcher starts to the fork servers: the folder of their sockets.
FOLDER = "LOCKSTEP_TEST_FORKS"
#: With this one every Python program becomes a fork, not only a rank: those that a test starts on a host of a cluster.
ALL = "LOCKSTEP_TEST_FORKS_ALL"
# What becomes a fork has one of these; all but the first are a rank's.
_OF_RANKS = (ALL, "RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
#: What an interpreter or a library reads when it starts, which a fork has behind it, but for what the fork is given.
READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "TORCH")
#: (Without that level of logging a fork could print a warning more.)
GIVEN = ("PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "TORCHELASTIC_", "TORCH_CPP_LOG_LEVEL")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)


def socket_path(folder: str) -> str:
    """Return where the fork server of this interpreter on this host (or namespace of a test) listens."""
    name = f"{os.path.realpath(sys.prefix)} {os.readlink('/proc/self/ns/net')}"
    return os.path.join(folder, f"start-{binascii.crc32(name.encode()):08x}")


def surroundings() -> str:
    """Return all that must be alike in a process and in the one that it would be forked from."""
    import resource

    spaces = [
        os.uname().nodename,
        *(os.readlink(f"/proc/self/ns/{name}") for name in ("net", "ipc", "pid", "user")),
    ]
    with open("/proc/self/cgroup") as file:
        group = file.read()
    with open("/proc/self/mountinfo") as file:
        # Named namespaces are also mounts.
        mounts = sorted({place for place in (line.split()[4] for line in file) if not place.startswith("/run/netns")})
    names = sorted(name for name in vars(resource) if name.startswith("RLIMIT_"))
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    read: dict[str, Any] = {
        key: value
        for key, value in sorted(os.environ.items())
        if key.startswith(READ_AT_START) and not key.startswith(GIVEN)
    }
    # mpirun puts its own folder there, in which a Python beside it looks anyway.
    folders = read.pop("LD_LIBRARY_PATH", "").split(os.pathsep)
    own = os.path.realpath(f"{sys.prefix}/lib")
    read["LD_LIBRARY_PATH"] = [folder for folder in folders if folder and os.path.realpath(folder) != own]
    return json.dumps([spaces, group, mounts, limits, read])


def _arguments() -> tuple[list[str], list[str]] | None:
    """Return what stands behind ``python`` and its options, and its filters of warnings, for a rank's program."""
    arguments, filters = sys.orig_argv[1:], []
    while arguments and arguments[0] in ("-u", "-B", "-W"):
        if arguments.pop(0) == "-W":
            filters.append(arguments.pop(0))
    if not arguments:
        return None
    if arguments[0] == "-c":
        return (arguments, filters) if "--multiprocessing-fork" in arguments else None
    is_rank = any(name in os.environ for name in _OF_RANKS)
    is_program = arguments[0] == "-m" or os.path.isfile(arguments[0])
    return (arguments, filters) if is_rank and is_program else None


def _open_files() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:  # that of the listing
            continue
        found.append(int(name))
    return sorted(found)


def hand_over() -> None:
    """Run this process's program as a fork, and end as that ends; return if it is to run here."""
    folder, started = os.environ.get(FOLDER), _arguments()
    if not folder or started is None:
        return
    path = socket_path(folder)
    try:
        with open(f"{path}.surroundings") as file:
            if file.read() != surroundings():
                return
    except OSError:
        return
    files = _open_files()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(path)
        program = {
            "arguments": started[0],
            "filters": started[1],
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
            "pid": os.getpid(),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "cores": sorted(os.sched_getaffinity(0)),
            "files": files,
        }
        socket.send_fds(server, [json.dumps(program).encode()], files)
        answer = server.recv(100)
    except OSError:
        answer = b""
    if not answer:  # nothing was started
        server.close()
        return
    _stand_for(int(answer), server, files)


def _stand_for(pid: int, server: socket.socket, files: list[int]) -> None:
    """Pass signals on to the fork, and end as it does."""

    def forward(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    # Whoever reads what the rank writes sees its end with the rank.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in files:
        os.dup2(nothing, descriptor)
    code = int(server.recv(100) or b"1")
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
