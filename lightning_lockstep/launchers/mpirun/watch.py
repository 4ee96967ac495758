"""Waits for mpirun to end, which it may never do by itself once a host has stopped answering.

mpirun ends when the daemons of all hosts have reported that their ranks exited. A daemon that is frozen, alone or
with its host, keeps its connection open and reports nothing. So once no rank is left on this host, and not all of
them have noted that they exit normally, mpirun gets a while and is then killed.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from lightning_lockstep.distributed.failure.exit_note import orderly_ends
from lightning_lockstep.launchers.mpi_environment import RANK_VARIABLES

__all__ = ["MPIRunWatch"]

_PERIOD = 2.0  # how often the ranks of this host are looked for [s]


class MPIRunWatch:
    """Waits for an mpirun.

    Args:
        ranks: Number of ranks on this host.
        patience: How long mpirun may take after the last of them, unless all of them exited normally [s].

    Attributes:
        ended_folder: Each rank of this host that exits normally leaves a note there.
        overdue: Whether mpirun had to be killed.
    """

    def __init__(self, ranks: int, patience: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-mpirun-")
        self.ended_folder = Path(self._folder.name)
        self.ranks, self.patience = ranks, patience
        self.overdue = False
        self._here: list[psutil.Process] = []
        self._began = False
        self._since: float | None = None
        self._interrupts = 0

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for mpirun to end; return its exit code.

        Ctrl-C is left to mpirun, which gets it from the terminal too; a second one kills it.

        Ranks: the parent process, which is no rank.
        """
        while True:
            try:
                with suppress(subprocess.TimeoutExpired):
                    return self._exit_code(process.wait(_PERIOD))
                self._check(process.pid)
            except KeyboardInterrupt:
                self._interrupts += 1
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

    def _exit_code(self, code: int) -> int:
        self._folder.cleanup()
        if self._interrupts:
            return 130
        return 1 if self.overdue else code if code >= 0 else 128 - code


def ranks_under(pid: int) -> list[psutil.Process]:
    """Return the ranks that mpirun has on this host.

    Args:
        pid: Process id of mpirun.
    """
    ranks = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if _runs(child) and any(name in child.environ() for name in RANK_VARIABLES):
                    ranks.append(child)
    return ranks


def end_with_children(pid: int) -> None:
    """Kill mpirun and what it has started on this host.

    Args:
        pid: Process id of mpirun.
    """
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
