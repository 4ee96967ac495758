"""Ranks that mpirun starts for the strategy, and the process that waits for it."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lightning_lockstep._lightning import _SubprocessScriptLauncher
from lightning_lockstep._settings import ENDED_FOLDER, RANK_CONFIG
from lightning_lockstep.distributed.failure.exit_notes import ended_with_error, first_failure, orderly_ends
from lightning_lockstep.distributed.failure.process_exit import end_after_exit_functions, flush_everything
from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.distributed.rendezvous import token_for_children
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments import LockstepEnvironment
from lightning_lockstep.launchers.mpi_hosts import check_hosts, hosts_for
from lightning_lockstep.launchers.mpirun_command import (
    MPIRun,
    MPIRunSettings,
    OutputRelay,
    mpirun_command,
    mpirun_environ,
)
from lightning_lockstep.launchers.rank_processes import ASKS_TO_END, SignalForwarding
from lightning_lockstep.launchers.rank_supervisor import current_job
from lightning_lockstep.launchers.rank_variables import RANK_VARIABLES
from lightning_lockstep.launchers.subprocess_script import rank_command

# -- Hands the configuration of a Hydra job to ranks on other hosts, in an environment variable --
# A file would have to lie in a folder that all hosts share, where others may replace it before a rank
# unpickles it, and where a forced end leaves it behind. mpirun carries the variable to the ranks over its
# own connections.

_OPTION = "--experimental-rerun"
_MOST = 120_000  # Linux takes variables of up to 128 KiB

# Hydra's option wants a path: that of a file without a name, in the process that runs the program.
_RECEIVE = f"""
import base64, os, sys, tempfile, zlib
file = tempfile.TemporaryFile(buffering=0)
file.write(zlib.decompress(base64.b64decode(os.environ.pop({RANK_CONFIG!r}))))
file.seek(0)
os.set_inheritable(file.fileno(), True)
os.execv(sys.argv[1], [*sys.argv[1:], {_OPTION!r}, "/dev/fd/%d" % file.fileno()])
"""


def config_for_all_hosts(program: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return (command, environment variables) with which a rank gets its configuration on any host."""
    if _OPTION not in program:
        return program, {}
    at = program.index(_OPTION)
    packed = base64.b64encode(zlib.compress(Path(program[at + 1]).read_bytes())).decode()
    if len(packed) > _MOST:
        raise LaunchError(
            f"The configuration of this job takes {len(packed):,} bytes when packed: expected at most {_MOST:,}, the"
            " most that ranks on other hosts can be given. Keep long lists in a file that the configuration names,"
            " or start the ranks with an mpirun of your own."
        )
    return [sys.executable, "-I", "-c", _RECEIVE, *program[:at]], {RANK_CONFIG: packed}


# -- Waits for mpirun to end, which it may never do by itself once a host has stopped answering --
# mpirun ends when the daemons of all hosts have reported that their ranks exited. A daemon that is frozen,
# alone or with its host, keeps its connection open and reports nothing. So once no rank is left on this
# host, and not all of them have noted that they exit normally, mpirun gets a while and is then killed.

_PERIOD = 2.0  # how often the ranks of this host are looked for [s]
_LEFT = 5.0  # how long ranks may outlive their mpirun [s]


class MPIRunWatch:
    def __init__(self, ranks: int, patience: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-mpirun-")
        self.ended_folder = Path(self._folder.name)  # where each rank here that exits normally leaves a note
        # ranks: on this host; patience: for mpirun after the last of them, unless all exited normally [s]
        self.ranks, self.patience = ranks, patience
        self.overdue = False  # mpirun had to be killed
        # Known at the end: whether ranks here have ended otherwise than by Ctrl-C, in good order or with an error that
        # they have printed; and which rank failed first, as these know it.
        self.unexplained = False
        self.failure: FailureRecord | None = None
        self._here: list[psutil.Process] = []
        self._seen: float | None = None  # when there were ranks here last, by the monotonic clock [s]
        self._interrupts = 0

    def wait(self, process: subprocess.Popen[bytes], on_end: Callable[[], None] = lambda: None) -> int:
        """Wait for mpirun to end; return its exit code."""
        # Signals are passed on. Ctrl-C goes to mpirun, which ends the ranks; a second one kills it. mpirun is
        # in a separate session: what is sent to this process group does not reach it.

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
                    try:
                        on_end()
                        self._check(process.pid)
                        process.send_signal(signal.SIGINT)
                    except KeyboardInterrupt:  # the second one, while the first is passed on
                        self._interrupts += 1
                if self.overdue or self._interrupts > 1:
                    end_with_children(process.pid)

    def _check(self, pid: int) -> None:
        self._here = [rank for rank in self._here if _runs(rank)] or ranks_under(pid)
        now = time.monotonic()
        if self._here:
            self._seen = now
        late = self._seen is not None and now - self._seen > self.patience
        self.overdue = late and not self._here and orderly_ends(self.ended_folder) < self.ranks

    def _exit_code(self, code: int, asked: signal.Signals | None) -> int:
        _, left = psutil.wait_procs(self._here, timeout=_LEFT)
        for rank in left:  # of an mpirun that was killed
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        if not self._interrupts:
            explained = ended_with_error(self.ended_folder) or orderly_ends(self.ended_folder) >= self.ranks
            self.unexplained = self._seen is not None and not explained
            self.failure = first_failure(self.ended_folder)
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
    """Send a signal to the ranks."""
    # mpirun itself passes SIGUSR1 and SIGUSR2 on to the ranks of all hosts, but ends them a second after one
    # that asks to end. So that goes to the ranks of this host, and to mpirun only if it has none here.
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


# -- Starts the ranks of this program with mpirun --
# The process in which the user makes the Trainer becomes the parent: no rank itself, it checks the hosts,
# runs ``mpirun`` on the same program, labels what the ranks print, and ends as they end.

# Linux ends mpirun, and mpirun the ranks of all hosts, when this process is gone.
_WITH_THIS_PROCESS = (
    *(sys.executable, "-I", "-S", "-c"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])",
)

# How long mpirun may take to end all other ranks, beyond the grace period in which they end by themselves [s].
_PATIENCE = 10.0

_UNEXPLAINED = """
lightning-lockstep: mpirun ended before the ranks of this host did, and none of them reported an error; what mpirun
printed is above. If that names a daemon or a connection, mpirun has lost a host: the network between the hosts is down,
or that host or its daemon is. Continue from the last checkpoint once it is back.
"""
_OVERDUE = """
lightning-lockstep: mpirun was still running {0:g} s after its ranks on this host had ended, and was killed. It waits
for the daemons of the other hosts: one of these is frozen, or its host is. Look there for processes that are left, and
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
        """Run the whole program on all ranks. Outside of Hydra this process then ends as they ended."""
        # In a Hydra job it returns, so that a sweep goes on; further calls of a Trainer in that job do
        # nothing, since the ranks have made them already.
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
        if not (sys.stdout is not None and sys.stdout.isatty()) and "TTY_COMPATIBLE" not in os.environ:
            # Open MPI gives each rank a terminal even so, on which rich would draw bars for whoever reads the file.
            environ["TTY_COMPATIBLE"] = "0"
        if hosts:
            program, config = config_for_all_hosts(program)
            environ |= config
        command = mpirun_command(self.mpirun, self.settings, variables=list(environ), **size)
        code = self._run([*command, *program], folder, environ)
        if job is not None and code == 0:
            MPIRunLauncher._done = job
            return None
        end_after_exit_functions(code)

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
        if watch.overdue:
            relay.say(_OVERDUE.format(watch.patience))
        elif watch.failure is not None and watch.failure.exit_code == code:
            # Below what mpirun has to say of the end of all ranks.
            relay.say("\n".join(["", watch.failure.headline(), watch.failure.saved_to()]).rstrip() + "\n")
        elif watch.unexplained and self.num_nodes > 1:
            relay.say(_UNEXPLAINED)
            return code or 1  # Open MPI 5 may call it a success that it has lost a host
        return code
