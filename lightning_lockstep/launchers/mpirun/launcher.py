"""Starts the ranks of this program with mpirun.

The process in which the user makes the Trainer becomes the parent: no rank itself, it checks the hosts, runs
``mpirun`` on the same program, labels what the ranks print, and ends as they end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from lightning_lockstep._environment import ENDED_FOLDER
from lightning_lockstep._lightning import _SubprocessScriptLauncher
from lightning_lockstep.distributed.failure.process_exit import end_after_exit_functions, flush_everything
from lightning_lockstep.distributed.side_channel.job_token import token_for_children
from lightning_lockstep.launchers.environments.cluster_environment import LockstepEnvironment
from lightning_lockstep.launchers.mpirun.command import (
    MPIRun,
    MPIRunSettings,
    mpirun_command,
    mpirun_environ,
)
from lightning_lockstep.launchers.mpirun.config_variable import config_for_all_hosts
from lightning_lockstep.launchers.mpirun.hosts import check_hosts, hosts_for
from lightning_lockstep.launchers.mpirun.output import OutputRelay
from lightning_lockstep.launchers.mpirun.watch import MPIRunWatch
from lightning_lockstep.launchers.subprocess_script import current_job, rank_command

__all__ = ["MPIRunLauncher", "ran_under_mpirun"]

# Linux ends mpirun, and mpirun the ranks of all hosts, when this process is gone.
_WITH_THIS_PROCESS = (
    *(sys.executable, "-I", "-S", "-c"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])",
)

# How long mpirun may take to end all other ranks, beyond the grace period in which they end by themselves [s].
_PATIENCE = 10.0

_HOST_LOST = """
lightning-lockstep: mpirun lost a host during the run (its name is above), so all ranks were ended. The network
between the hosts is down, or that host or its daemon is. Continue from the last checkpoint once it is back.
"""
_OVERDUE = """
lightning-lockstep: mpirun had not ended {0:g} s after its ranks on this host, and was killed. It waits for the
daemons of the other hosts: one of these is frozen, or its host is. Look there for processes that are left, and
continue from the last checkpoint.
"""


def ran_under_mpirun() -> bool:
    """Return whether the ranks of this Hydra job have run, and ended, under an mpirun of ours."""
    return MPIRunLauncher._done is not None and MPIRunLauncher._done == current_job()


class MPIRunLauncher(_SubprocessScriptLauncher):
    """Runs this program under mpirun and waits for it."""

    _done: object = None

    def __init__(
        self, settings: MPIRunSettings, mpirun: MPIRun, *, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(LockstepEnvironment(), num_processes, num_nodes)
        self.settings, self.mpirun = settings, mpirun

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run the whole program on all ranks. Outside of Hydra this process then ends as they ended.

        In a Hydra job it returns, so that a sweep goes on; further calls of a Trainer in that job do nothing,
        since the ranks have made them already.
        """
        job = current_job()
        if job is not None and MPIRunLauncher._done == job:
            return None
        size = {"num_processes": self.num_processes, "num_nodes": self.num_nodes}
        hosts = hosts_for(self.settings, **size)
        if hosts:
            check_hosts(hosts, self.mpirun, self.settings)
        self._check_can_spawn_children()
        program, folder = rank_command()
        environ = token_for_children()
        if hosts:
            program, config = config_for_all_hosts(program)
            environ |= config
        command = mpirun_command(self.mpirun, self.settings, variables=list(environ), **size)
        code = self._run([*command, *program], folder, environ)
        if job is not None and code == 0:
            MPIRunLauncher._done = job
            return None
        end_after_exit_functions(code)

    def kill(self, signum: Any) -> None:
        """Send a signal to mpirun, which passes it on."""
        for process in self.procs:
            if process.poll() is None:
                process.send_signal(signum)

    def _run(self, command: list[str], folder: str | None, environ: dict[str, str]) -> int:
        watch = MPIRunWatch(self.num_processes, self.settings.grace_period + _PATIENCE)
        flush_everything()  # what this process has printed comes first
        process = subprocess.Popen(
            [*_WITH_THIS_PROCESS, *command] if sys.platform == "linux" else command,
            env={**mpirun_environ(self.settings), **environ, ENDED_FOLDER: str(watch.ended_folder)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.procs = [process]
        assert process.stdout is not None and process.stderr is not None
        relay = OutputRelay((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        code = watch.wait(process, relay.expect_end)
        relay.finish()
        if relay.host_lost:
            relay.say(_HOST_LOST)
            return code or 1  # Open MPI 5 calls this a success
        if watch.overdue:
            relay.say(_OVERDUE.format(watch.patience))
        return code
