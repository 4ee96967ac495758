"""Waits for mpirun to end, which it may never do by itself once a host has stopped answering.

mpirun ends when the daemons of all hosts have reported that their ranks exited. A daemon that is frozen, alone or
with its host, keeps its connection open and reports nothing. So once no rank is left on this host, and not all of
them have noted that they exit normally, mpirun gets a while and is then killed.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from lightning_lockstep.distributed.failure.exit_note import orderly_ends
from lightning_lockstep.launchers.environments.mpi_environment import RANK_VARIABLES
from lightning_lockstep.launchers.forwarding import ASKS_TO_END, SignalForwarding

__all__ = ["MPIRunWatch"]

_PERIOD = 2.0  # how often the ranks of this host are looked for [s]
_LEFT = 5.0  # how long ranks may outlive their mpirun [s]


class MPIRunWatch:
    def __init__(self, ranks: int, patience: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-mpirun-")
        self.ended_folder = Path(self._folder.name)  # where each rank here that exits normally leaves a note
        # ranks: on this host; patience: for mpirun after the last of them, unless all exited normally [s]
        self.ranks, self.patience = ranks, patience
        self.overdue = False  # mpirun had to be killed
        self._here: list[psutil.Process] = []
        self._began = False
        self._since: float | None = None
        self._interrupts = 0

    def wait(self, process: subprocess.Popen[bytes], on_end: Callable[[], None] = lambda: None) -> int:
        """Wait for mpirun to end; return its exit code.

        Signals are passed on. Ctrl-C goes to mpirun, which ends the ranks; a second one kills it. mpirun is in a
        session of its own: what is sent to this process group does not reach it.
        """

        def send(number: int) -> None:
            if number in ASKS_TO_END:
                on_end()
            send_to_ranks(process, number)

        with SignalForwarding(send, lambda: end_with_children(process.pid)) as signals:
            while True:
                try:
                    with suppress(subprocess.TimeoutExpired):
                        return self._exit_code(process.wait(_PERIOD), signals.asked)
                    self._check(process.pid)
                    signals.check()
                except KeyboardInterrupt:
                    self._interrupts += 1
                    on_end()
                    self._check(process.pid)
                    process.send_signal(signal.SIGINT)
                if self.overdue or self._interrupts > 1:
                    end_with_children(process.pid)

    def _check(self, pid: int) -> None:
        if not self._all_exited(pid):
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        late = self._since is not None and time.monotonic() - self._since > self.patience
        self.overdue = late and orderly_ends(self.ended_folder) < self.ranks

    def _all_exited(self, pid: int) -> bool:
        """Return whether this host has had ranks and has none left."""
        self._here = [rank for rank in self._here if _runs(rank)] or ranks_under(pid)
        self._began = self._began or bool(self._here)
        return self._began and not self._here

    def _exit_code(self, code: int, asked: signal.Signals | None) -> int:
        _, left = psutil.wait_procs(self._here, timeout=_LEFT)
        for rank in left:  # of an mpirun that was killed
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        self._folder.cleanup()
        if self._interrupts:
            return 130
        if self.overdue:
            return 1
        return code if code >= 0 else 128 + (asked or -code)


def ranks_under(pid: int) -> list[psutil.Process]:
    """Return the ranks that mpirun has on this host, without what they have started themselves."""
    try:
        return _ranks_below(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return []


def _ranks_below(process: psutil.Process) -> list[psutil.Process]:
    ranks: list[psutil.Process] = []
    for child in process.children():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            is_rank = any(name in child.environ() for name in RANK_VARIABLES)
            ranks += [child] if is_rank and _runs(child) else _ranks_below(child)
    return ranks


def send_to_ranks(mpirun: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the ranks.

    mpirun itself passes SIGUSR1 and SIGUSR2 on to the ranks of all hosts, but ends them a second after one that asks to
    end. So that goes to the ranks of this host, and to mpirun only if it has none here.
    """
    ranks = ranks_under(mpirun.pid) if number in ASKS_TO_END else []
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    if not ranks:
        mpirun.send_signal(number)


def end_with_children(pid: int) -> None:
    """Kill mpirun and what it has started on this host."""
    with suppress(psutil.NoSuchProcess):
        mpirun = psutil.Process(pid)
        for process in (mpirun, *mpirun.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
