"""Ranks that mpirun starts for the strategy, and the process that waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from lightning_lockstep._lightning import _SubprocessScriptLauncher
from lightning_lockstep._registry import public
from lightning_lockstep._settings import NOTES_FOLDER
from lightning_lockstep._system import shell_exit_code
from lightning_lockstep._text import say
from lightning_lockstep.distributed.failure.process_exit import flush_everything
from lightning_lockstep.distributed.failure.record import has_orderly_end
from lightning_lockstep.distributed.rendezvous import token_for_children
from lightning_lockstep.launchers.environments import LockstepEnvironment
from lightning_lockstep.launchers.mpirun_command import (
    MPIRun,
    MPIRunSettings,
    check_hosts,
    is_this_host,
    mpirun_command,
    mpirun_environ,
)
from lightning_lockstep.launchers.rank_processes import ASKS_TO_END, SignalForwarding
from lightning_lockstep.launchers.rank_supervisor import end_as_ranks_did, ran_elsewhere
from lightning_lockstep.launchers.subprocess_script import rank_command

# -- Starts the ranks of this program with mpirun --
# The process in which the user makes the Trainer becomes the parent: no rank itself, it checks the hosts,
# hands over to one ``mpirun`` of the same program, and ends as that ends.

# Linux ends mpirun, and mpirun the ranks of all hosts, when this process is gone.
_WITH_THIS_PROCESS = (
    *(sys.executable, "-I", "-S", "-c"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])",
)
_LOST = (
    "\nlightning-lockstep: mpirun ended without an error, but no rank of this host had finished: another host was"
    " lost. Resume from the last checkpoint once it is back.\n"
)


class MPIRunLauncher(_SubprocessScriptLauncher):
    """Runs this program under mpirun and waits for it."""

    def __init__(self, strategy: Any, settings: MPIRunSettings, mpirun: MPIRun) -> None:
        super().__init__(LockstepEnvironment(), strategy.num_processes, strategy.num_nodes)
        self.settings, self.mpirun = settings, mpirun

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run the whole program on all ranks. Outside Hydra this process then ends as they ended."""
        # In a Hydra job it returns, so that a sweep goes on; further calls of a Trainer in that job do
        # nothing, because the ranks have made them already.
        if ran_elsewhere():
            return None
        hosts = check_hosts(self.settings, self.mpirun, num_nodes=self.num_nodes)
        has_ranks_here = any(map(is_this_host, hosts))  # asked now, because an interface may go down
        program, folder, variables = rank_command()
        environ = {**token_for_children(), **variables}
        if not (sys.stdout is not None and sys.stdout.isatty()) and "TTY_COMPATIBLE" not in os.environ:
            # Open MPI gives each rank a terminal even so, on which rich would draw bars for whoever reads the file.
            environ["TTY_COMPATIBLE"] = "0"
        command = mpirun_command(
            self.mpirun,
            self.settings,
            num_processes=self.num_processes,
            num_nodes=self.num_nodes,
            variables=list(environ),
        )
        flush_everything()  # what this process has printed comes first
        with tempfile.TemporaryDirectory(prefix="lockstep-mpirun-") as name:
            notes = Path(name)
            process = subprocess.Popen(
                [*_WITH_THIS_PROCESS, *command, *program],
                env={**mpirun_environ(self.settings), **environ, NOTES_FOLDER: name},
                cwd=folder,
                start_new_session=True,  # signals to this group reach mpirun from here alone
            )
            self.procs = [process]
            code = _wait(process, _saves_on_a_signal(trainer))
            if code == 0 and self.num_nodes > 1 and has_ranks_here and not has_orderly_end(notes):
                say(_LOST)  # Open MPI 5 calls it a success
                code = 1
        end_as_ranks_did(code)


def _saves_on_a_signal(trainer: Any) -> bool:
    """Return whether the ranks save a checkpoint and end together when they get SIGUSR1."""
    kind, callbacks = public("StopTogether"), () if trainer is None else trainer.callbacks
    return any(isinstance(one, kind) and "SIGUSR1" in one.signals for one in callbacks)


def _wait(mpirun: subprocess.Popen[bytes], saves: bool) -> int:
    """Wait for mpirun to end, passing signals on; return its exit code as a shell would."""

    def send(number: int) -> None:
        # mpirun passes SIGUSR1 to the ranks, and ends them on those that ask it to end.
        mpirun.send_signal(signal.SIGUSR1 if saves and number in ASKS_TO_END else number)

    asks = *ASKS_TO_END, signal.SIGINT
    with SignalForwarding(send, partial(_end_with_children, mpirun.pid), asks) as signals:
        code = mpirun.wait()
    if signals.asked == signal.SIGINT:
        return shell_exit_code(-signal.SIGINT)
    return shell_exit_code(-signals.asked if code < 0 and signals.asked else code)


def _end_with_children(pid: int) -> None:
    """Kill mpirun and what it has started on this host."""
    with suppress(psutil.NoSuchProcess):
        mpirun = psutil.Process(pid)
        for process in (mpirun, *mpirun.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
