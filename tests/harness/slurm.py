"""A real Slurm on this machine: a controller and two nodes that share the host, each with a daemon of its own.

Needs root and Debian's ``slurmctld slurmd slurm-client munge``; :func:`why_no_slurm` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.harness.child_site.fork_start import FOLDER
from tests.harness.patience import patience, wait_until
from tests.harness.ports import reserve_port
from tests.harness.ranks import forks_of_launched_ranks
from tests.harness.scripts import ScriptOutcome, run_script
from tests.harness.started import Started

__all__ = ["Slurm", "why_no_pmix", "why_no_slurm"]

_COMMANDS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "sbatch": "slurm-client",
}

_CONF = """
ClusterName=tests{pid}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=10
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
_LOG_TAIL = 4_000  # how much of a daemon's log a failed test shows [characters]


def why_no_slurm() -> str | None:
    """Return why this machine cannot have a Slurm, or ``None`` when it can."""
    if os.geteuid() != 0:
        return "a Slurm needs root"
    for command, package in _COMMANDS.items():
        if _found(command) is None:
            return f"a Slurm needs the command {command} (package {package})"
    return None


def why_no_pmix() -> str | None:
    """Return why ``srun --mpi=pmix`` cannot work on this machine, or ``None`` when it can."""
    # Looked for, not loaded: in one process with Open MPI's own, the two would share their symbols.
    folders = (Path("/usr/lib"), *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/local/lib"))
    if any((folder / "libpmix.so").exists() for folder in folders):  # the name that Slurm's plugin loads
        return None
    return "srun --mpi=pmix needs libpmix.so (package libpmix-dev)"


def _found(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class Slurm(Started):
    """The cluster. Use it as a context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-slurm-"))
        self.folder.chmod(0o755)  # munged refuses a folder that only root can enter
        self._daemons: list[subprocess.Popen[bytes]] = []

    def environment(self, **more: str) -> dict[str, str]:
        """Return what a command of Slurm needs, and ``more``; ranks are forks as those of other launchers are."""
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            FOLDER: str(forks_of_launched_ranks()),
            "MASTER_ADDR": "127.0.0.1",  # no name server knows n1 and n2
            **more,
        }

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        timeout: float = 90.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> ScriptOutcome:
        """Run a command such as ``srun`` to its end."""
        return run_script(command, timeout=timeout, env=self.environment(**(env or {})), cwd=cwd)

    def submit(self, script: str, *options: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch script; return the number of the job. Its output is ``<cwd>/job-<number>.out``."""
        file = cwd / "job.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        # A requeued job adds to what it has written.
        fixed = ["--parsable", "--open-mode=append", f"--output={cwd}/job-%A_%a.out"]
        # Not by run_script, whose mark the job would inherit: what has it is killed once sbatch has ended.
        return self._ask("sbatch", *fixed, *options, str(file), cwd=cwd, env=env).strip().partition(";")[0]

    def state(self, job: str) -> str:
        """Return the state of a job, such as ``RUNNING`` or ``COMPLETED``."""
        done = self._ask("scontrol", "show", "job", "--oneliner", job)
        return done.partition("JobState=")[2].split(" ")[0]

    def wait(self, job: str, timeout: float = 90.0) -> str:
        """Wait until a job has ended; return its state."""
        # Empty where the controller was too busy to answer.
        goes_on = ("", "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
        has_ended = wait_until(lambda: self.state(job) not in goes_on, patience(timeout), 0.2)
        assert has_ended, f"job {job} is still {self.state(job)}"
        return self.state(job)

    def signal(self, job: str, sig: int) -> None:
        """Send a signal to all tasks of a job, not to its batch script, as ``--signal`` does."""
        self._ask("scancel", f"--signal={signal.Signals(sig).name[3:]}", job)

    def output(self, cwd: Path, job: str) -> str:
        """Return what a job has printed so far."""
        found = sorted(cwd.glob(f"job-{job}_*.out"))
        return "".join(path.read_text(errors="replace") for path in found)

    def describe(self, cwd: Path, job: str) -> str:
        """Return all that is known of a job, for a test that has failed: its output, its state, the daemons' logs."""
        asked = self._ask("scontrol", "show", "job", job) + self._ask("sinfo", "--long", "--Node", "--list-reasons")
        return f"{self.output(cwd, job)}\n{asked}\n{self._logs()}"

    def close(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if len(self._daemons) > 1:
                self._ask("scancel", "--user=root", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        living = [psutil.Process(daemon.pid) for daemon in self._daemons if daemon.poll() is None]
        for process in psutil.wait_procs(living, patience(10))[1]:
            process.kill()
        for daemon in self._daemons:
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        given = {**os.environ, **self.environment(**(env or {}))}
        done = subprocess.run(
            command, capture_output=True, text=True, env=given, cwd=cwd, check=False, timeout=patience(60)
        )
        return done.stdout

    def _start(self) -> None:
        with contextlib.ExitStack() as stack:
            ports = [stack.enter_context(reserve_port()) for _ in range(3)]
            conf = _CONF.format(host=socket.gethostname(), folder=self.folder, ports=ports, pid=os.getpid())
        (self.folder / "slurm.conf").write_text(conf.lstrip())
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = [f"--{name}={self.folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
        self._daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.sock", *files, key=key)
        self._daemon("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        ask = ("sinfo", "--noheader", "--format=%T %D")
        assert wait_until(lambda: self._ask(*ask).split() == ["idle", "2"], patience(30), 0.1), self._logs()

    def _daemon(self, command: str, *arguments: str, key: Path | None = None) -> None:
        found = _found(command)
        assert found is not None
        given = [] if key is None else [f"--key-file={key}"]
        env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons.append(
            subprocess.Popen(
                [found, *arguments, *given],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        if command == "munged":
            assert wait_until((self.folder / "munge.sock").exists, patience(10)), self._logs()

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("*.log*"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-_LOG_TAIL:]}" for path in logs)
