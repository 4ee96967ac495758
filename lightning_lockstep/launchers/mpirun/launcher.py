"""Starts the ranks of this program with mpirun.

The process in which the user makes the Trainer becomes the parent: no rank itself, it checks the hosts, runs
``mpirun`` on the same program, labels what the ranks print, and ends as they end.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from lightning_lockstep._environment import ENDED_FOLDER
from lightning_lockstep._lightning import _SubprocessScriptLauncher
from lightning_lockstep.distributed.failure.process_exit import at_exit, end_after_exit_functions
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.cluster_environment import LockstepEnvironment
from lightning_lockstep.launchers.mpirun.hosts import Host, check_hosts, read_hostfile
from lightning_lockstep.launchers.mpirun.watch import MPIRunWatch
from lightning_lockstep.launchers.subprocess_script import current_job, rank_command

__all__ = ["MPIRun", "MPIRunLauncher", "MPIRunSettings", "find_mpirun", "ran_under_mpirun"]

# Variables that ranks on other hosts need as they are here; mpirun passes the rest of its own.
_PASSED_ON = (
    "PATH",
    "PYTHON",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "OMP_",
    "MKL_",
    "LOCKSTEP_",
    "HYDRA_",
    "HF_",
    "CUDA_",
)
_TAGGED = re.compile(r"^\[(?:\d+,)?(\d+)\](?:<\w+>:)? ?(.*)$", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class MPIRunSettings:
    """How to start ranks; see :class:`LockstepMPIStrategy` for the meaning.

    Raises:
        ConfigurationError: The hostfile does not exist or cannot be read.
    """

    hostfile: str | Path | None = None
    mpirun: str | None = None
    mpirun_args: tuple[str, ...] = ()
    ssh_args: tuple[str, ...] = ()
    grace_period: float = 10.0

    def __post_init__(self) -> None:
        if self.hostfile is not None and not Path(self.hostfile).is_file():
            raise ConfigurationError(
                f"hostfile={str(self.hostfile)!r}: there is no such file. Expected one host a line, such as"
                " 'node1 slots=4' (Open MPI) or 'node1:4' (MPICH)."
            )


@dataclass(frozen=True)
class MPIRun:
    """An mpirun.

    Attributes:
        command: Path of the command.
        kind: ``open_mpi`` or ``hydra`` (MPICH, Intel MPI, MVAPICH).
        version: First line of what it says about itself.
    """

    command: str
    kind: str
    version: str


def find_mpirun(settings: MPIRunSettings) -> MPIRun | None:
    """Return the mpirun to use: the given one, the one beside this Python, or the first in ``PATH``.

    Raises:
        LaunchError: The given one cannot be run.

    Ranks: the process that starts the ranks; runs the command once.
    """
    beside = Path(sys.prefix, "bin", "mpirun")
    command = settings.mpirun or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if command is None:
        return None
    try:
        answer = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"mpirun={command!r} cannot be run: {error}") from error
    said = answer.stdout + answer.stderr
    kind = "open_mpi" if re.search(r"Open MPI|OpenRTE|PRRTE", said) else "hydra"
    return MPIRun(command, kind, next((line for line in said.splitlines() if line.strip()), ""))


def ran_under_mpirun() -> bool:
    """Return whether the ranks of this Hydra job have run, and ended, under an mpirun of ours.

    Ranks: any process, alone.
    """
    return MPIRunLauncher._done is not None and MPIRunLauncher._done == current_job()


class MPIRunLauncher(_SubprocessScriptLauncher):
    """Runs this program under mpirun and waits for it.

    Args:
        settings: What the user has set.
        mpirun: The mpirun.
        num_processes: Number of ranks on a node.
        num_nodes: Number of nodes.
    """

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

        Raises:
            LaunchError: The hosts are not ready, or the ranks ended badly in a Hydra job.

        Ranks: the parent process, which is no rank.
        """
        job = current_job()
        if job is not None and MPIRunLauncher._done == job:
            return None
        hosts = self._hosts()
        if hosts:
            check_hosts(hosts, self.mpirun, self.settings.ssh_args, environ=self._environ())
        self._check_can_spawn_children()
        program, folder = rank_command()
        if hosts:
            program = _where_all_hosts_see_it(program)
        code = self._run([*self.command(hosts), *program], folder)
        if job is not None and code == 0:
            MPIRunLauncher._done = job
            return None
        end_after_exit_functions(code)

    def command(self, hosts: list[Host]) -> list[str]:
        """Return the mpirun command up to the program.

        Args:
            hosts: Hosts of the hostfile; empty for this host alone.
        """
        size, settings = self.num_processes * self.num_nodes, self.settings
        if self.mpirun.kind == "hydra":
            command = [self.mpirun.command, "-l", "-n", str(size), "-ppn", str(self.num_processes)]
            command += ["-f", str(settings.hostfile)] if hosts else []
            return [*command, *settings.mpirun_args]
        command = [self.mpirun.command, "-n", str(size), "--output", "tag", "--bind-to", "none"]
        mapping = f"ppr:{self.num_processes}:node"
        if hosts:
            prefix = Path(self.mpirun.command).resolve().parent.parent
            command += ["--hostfile", str(settings.hostfile), "--map-by", mapping, "--prefix", str(prefix)]
            # A host that is gone without a word is noticed within seconds, not within two hours.
            for name, value in (("time", 5), ("intvl", 3), ("probes", 3)):
                command += ["--prtemca", f"oob_tcp_keepalive_{name}", str(value)]
            if settings.ssh_args:
                command += ["--prtemca", "plm_ssh_args", " ".join(settings.ssh_args)]
            for name in sorted(os.environ):
                if name.startswith(_PASSED_ON):
                    command += ["-x", name]
        else:
            command += ["--map-by", f"{mapping}:OVERSUBSCRIBE"]
        return [*command, *settings.mpirun_args]

    def kill(self, signum: Any) -> None:
        """Send a signal to mpirun, which passes it on."""
        for process in self.procs:
            if process.poll() is None:
                process.send_signal(signum)

    def _hosts(self) -> list[Host]:
        if self.settings.hostfile is None:
            if self.num_nodes > 1:
                raise LaunchError(
                    f"num_nodes={self.num_nodes} was given, but no hostfile: expected hostfile=... with"
                    f" {self.num_nodes}"
                    f" hosts of {self.num_processes} slots each, or ranks that are started by mpirun or srun."
                )
            return []
        hosts = read_hostfile(Path(self.settings.hostfile))[: self.num_nodes]
        short = [host for host in hosts if host.slots is not None and host.slots < self.num_processes]
        if len(hosts) < self.num_nodes or short:
            rows = "\n".join(
                f"  {host.name:<24}{host.slots if host.slots is not None else 'not given'}" for host in hosts
            )
            raise LaunchError(
                f"The Trainer wants {self.num_nodes} node(s) with {self.num_processes} ranks each, but the"
                f" hostfile"
                f" {self.settings.hostfile} does not have them:\n\n  {'host':<24}slots\n{rows}\n\n"
                "Add hosts or slots to it, or lower devices or num_nodes."
            )
        return hosts

    def _environ(self) -> dict[str, str]:
        environ = dict(os.environ)
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            # Whoever runs this program as root has decided so; mpirun would ask once more.
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if self.settings.ssh_args:
            environ["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(self.settings.ssh_args)
        environ.setdefault("PYTHONUNBUFFERED", "1")
        # When rank 0 is gone, torch's store prints stacks in C++ on every other rank, below the report.
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return environ

    def _run(self, command: list[str], folder: str | None) -> int:
        watch = MPIRunWatch(self.num_processes, self.settings.grace_period + _PATIENCE)
        process = subprocess.Popen(
            command,
            env=self._environ() | {ENDED_FOLDER: str(watch.ended_folder)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.procs = [process]
        began, lost = threading.Event(), threading.Event()
        streams = [(process.stdout, sys.stdout, began, lost), (process.stderr, sys.stderr, began, lost)]
        threads = [threading.Thread(target=_label, args=one, daemon=True) for one in streams]
        for thread in threads:
            thread.start()
        previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = watch.wait(process)
        finally:
            signal.signal(signal.SIGTERM, previous)
        for thread in threads:
            thread.join(5.0)
        if lost.is_set():
            sys.stderr.write(
                "\nlightning-lockstep: mpirun lost a host in the midst of the run (its name is above), so"
                " all ranks were"
                " ended. The network between the hosts is down, or that host or its daemon is. Continue"
                " from the last"
                " checkpoint once it is back.\n"
            )
            return code or 1  # Open MPI 5 calls this a success
        if watch.overdue:
            sys.stderr.write(
                f"\nlightning-lockstep: mpirun had not ended {watch.patience:g} s after its ranks on this host, and"
                " was killed. It waits for the daemons of the other hosts: one of these is frozen, or its host is."
                " Look there for processes that are left, and continue from the last checkpoint.\n"
            )
        return code


def _where_all_hosts_see_it(program: list[str]) -> list[str]:
    """Put the configuration of a Hydra job into its run folder: hosts share that, but not /tmp."""
    if "--experimental-rerun" not in program:
        return program
    from hydra.core.hydra_config import HydraConfig

    at = program.index("--experimental-rerun") + 1
    copy = Path(HydraConfig.get().runtime.output_dir, ".ranks.pickle")
    shutil.copy(program[at], copy)
    at_exit(functools.partial(copy.unlink, missing_ok=True))
    return [*program[:at], str(copy), *program[at + 1 :]]


def _label(source: IO[bytes], target: TextIO, began: threading.Event, lost: threading.Event) -> None:
    """Pass on what mpirun prints, each line with its rank, without its remarks about an end by force."""
    blocks: dict[str, list[str]] = {}  # by rank: lines since a line of dashes
    for line in source:
        said = line.decode(errors="replace").replace("\0", "")
        tagged = _TAGGED.match(said)
        mark, text = (f"[rank {tagged[1]}] ", tagged[2]) if tagged else ("", said)
        if not tagged and _COUNTED.match(text):
            continue
        if tagged:
            began.set()
        if not tagged and (
            "lost communication with a remote daemon" in text or (began.is_set() and _DAEMON_GONE in text)
        ):
            lost.set()
        if len(text) > 40 and not text.strip("-\n"):
            block = blocks.pop(mark, None)
            if block is None:
                blocks[mark] = []
            elif not any(_REMARKS.search(one) for one in block):
                target.write("".join(mark + one for one in block))
        elif mark in blocks:
            blocks[mark].append(text)
        elif text.strip():
            target.write(mark + text)
        target.flush()
    for mark, block in blocks.items():  # the last dashes never came
        target.write("".join(mark + one for one in block))


# How long mpirun may take to end all other ranks, beyond the grace period in which they end by themselves [s].
_PATIENCE = 10.0

# What mpirun says when the ssh that holds a daemon ends: at start a daemon that did not come up, later one lost.
_DAEMON_GONE = "daemon failed to report back after being spawned"

# How often more mpirun would have said what it has said once.
_COUNTED = re.compile(r"\s*\d+ more process(es have| has) sent help message")

# The report of the rank that failed first comes last; what mpirun has to add says less.
_REMARKS = re.compile(
    r"MPI_ABORT was invoked|Proc: \[\[|Errorcode:|NOTE: invoking MPI_ABORT|You may or may not see"
    r"|exactly when"
    r"|prterun (has exited|detected)|job to be terminated|The first process to do so|Process name:|Exit code:"
    r'|"abort"\. This may|terminated by signals sent'
)
