"""Two hosts on one machine: network namespaces with a cable between them, host names and sshd of their own.

Everything lives in private address space inside the namespaces; nothing outside is touched. Needs root, the
right to make namespaces, iproute2 and openssh-server; :func:`why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.harness.child_site.fork_start import ALL, FOLDER
from tests.harness.patience import patience, wait_until
from tests.harness.ranks import server_command
from tests.harness.started import Started
from tests.models.distributed.mpi.launch import mpi_command

__all__ = ["Cluster", "why_not"]

_SSH_PORT = 2222  # inside the namespaces, where nobody else listens


def why_not() -> str | None:
    """Return why this machine cannot have a cluster, or ``None`` when it can."""
    if os.geteuid() != 0:
        return "two hosts need root, to make network namespaces"
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("ssh-keygen", "openssh-client")):
        if shutil.which(command) is None:
            return f"two hosts need the command {command} (package {package})"
    if not Path("/usr/sbin/sshd").exists():
        return "two hosts need /usr/sbin/sshd (package openssh-server)"
    name = f"lockstep-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"two hosts need network namespaces, which are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Cluster(Started):
    """Two hosts, ``10.77.<n>.1`` (alpha) and ``10.77.<n>.2`` (beta); ranks on them are forks. A context manager."""

    def __init__(self, *, ipv6: bool = False) -> None:
        number = os.getpid() % 250
        self._ipv6 = ipv6
        network = f"fd77:{number}::" if ipv6 else f"10.77.{number}."
        self.addresses = (f"{network}1", f"{network}2")
        self.spaces = tuple(f"lockstep-{os.getpid()}-{name}" for name in ("alpha", "beta"))
        self.cables = (f"lka{os.getpid()}", f"lkb{os.getpid()}")
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-cluster-"))
        key, known = self.folder / "key", "/dev/null"
        self.ssh_args = [
            *("-p", str(_SSH_PORT), "-i", str(key), "-o", "StrictHostKeyChecking=no"),
            *("-o", f"UserKnownHostsFile={known}", "-o", "LogLevel=ERROR"),
        ]
        # A killed daemon of Open MPI leaves its folder behind, and a later one of the same process id cannot
        # start beside it: each cluster has a place of its own for them.
        self._environment = {FOLDER: str(self.folder), ALL: "1", "PRTE_MCA_prte_tmpdir_base": str(self.folder)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._servers: list[subprocess.Popen[str]] = []

    def start(self, host: int, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start a command on host 0 or 1, in a session of its own; its output is text through pipes."""
        # It and ranks below it are forks of a process on their host that has imported torch and Lightning already.
        inside = ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "sh", "-c"]
        options["env"] = {**(options.get("env") or os.environ), **self._environment}  # type: ignore[dict-item]
        named = f'hostname {("alpha", "beta")[host]}; exec "$@"'
        return subprocess.Popen(
            [*inside, named, "sh", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,  # type: ignore[call-overload]
        )

    def run(self, host: int, command: Sequence[str], timeout: float = 60.0, **options: object) -> tuple[int, str]:
        """Run a command on a host; return (exit code, output). It is ended when the time is up."""
        process = self.start(host, command, **options)
        try:
            output, _ = process.communicate(timeout=patience(timeout))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return 124, output
        return process.returncode, output

    def mpi_command(self, ranks: int) -> list[str]:
        """Return the command that starts ``ranks`` Pythons on each host, up to the arguments of Python."""
        mpirun = mpi_command("open_mpi", 1)[0]
        prefix = str(Path(mpirun).resolve().parent.parent)
        hosts = ",".join(f"{address}:{ranks}" for address in self.addresses)
        ssh = ["--prtemca", "plm_ssh_args", " ".join(self.ssh_args)]
        places = ["-n", str(2 * ranks), "--map-by", f"ppr:{ranks}:node", "--bind-to", "none"]
        return [
            *(mpirun, *places, "-H", hosts, "--prefix", prefix, *ssh),
            *("-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", sys.executable),
        ]

    def cut(self) -> None:
        """Cut the cable: nothing arrives any more, and nobody is told."""
        subprocess.run(["ip", "netns", "exec", self.spaces[0], "ip", "link", "set", self.cables[0], "down"], check=True)

    def mend(self) -> None:
        """Mend the cable."""
        subprocess.run(["ip", "netns", "exec", self.spaces[0], "ip", "link", "set", self.cables[0], "up"], check=True)

    def stop_sshd(self) -> None:
        """End the ssh daemon of the second host, so that connections are refused."""
        self._daemons[1].terminate()
        self._daemons[1].wait(10)

    def start_sshd(self, host: int) -> None:
        """Start the ssh daemon of a host."""
        config = self.folder / f"sshd{host}.conf"
        config.write_text(
            f"Port {_SSH_PORT}\nHostKey {self.folder / 'hostkey'}\nAuthorizedKeysFile"
            f" {self.folder / 'key.pub'}\n"
            "StrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nAcceptEnv *\n"
            f"SetEnv {' '.join(f'{name}={value}' for name, value in self._environment.items())}\n"
            f"PidFile {self.folder / f'sshd{host}.pid'}\nMaxStartups 100\n"
        )
        inside = ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "sh", "-c"]
        command = f"hostname {('alpha', 'beta')[host]}; exec /usr/sbin/sshd -D -e -f {config}"
        said = self.folder / f"sshd{host}.log"
        with said.open("ab") as log:
            before = log.tell()
            daemon = subprocess.Popen([*inside, command], stdout=log, stderr=log, start_new_session=True)
        if len(self._daemons) > host:
            self._daemons[host] = daemon
        else:
            self._daemons.append(daemon)
        assert wait_until(lambda: b"Server listening" in said.read_bytes()[before:]), said.read_text()

    def pids_on(self, host: int) -> list[int]:
        """Return the processes of a host but its ssh daemon and its fork server."""
        listed = subprocess.run(["ip", "netns", "pids", self.spaces[host]], capture_output=True, text=True, check=True)
        own = [one.pid for one in (*self._daemons, *self._servers)]
        return [pid for pid in map(int, listed.stdout.split()) if pid not in own]

    def kill(self, pids: Sequence[int]) -> None:
        """Kill processes of the cluster."""
        for pid in pids:
            with_name = Path(f"/proc/{pid}")
            if with_name.exists():
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End everything that runs on the hosts, and take them down."""
        for host, space in enumerate(self.spaces):
            listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
            self.kill([int(pid) for pid in listed.stdout.split()])
            if host < len(self._daemons):
                self._daemons[host].wait(10)
            if host < len(self._servers):
                self._servers[host].communicate()
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True)

        for name in ("key", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        for space in self.spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for space, cable, address in zip(self.spaces, self.cables, self.addresses, strict=True):
            ip("link", "set", cable, "netns", space)
            ip("-n", space, "link", "set", cable, "up")
            prefix = ["64", "nodad"] if self._ipv6 else ["24"]
            ip("-n", space, "address", "add", f"{address}/{prefix[0]}", *prefix[1:], "dev", cable)
            if self._ipv6:
                ip("-n", space, "address", "delete", "127.0.0.1/8", "dev", "lo")
        sockets = [self.folder / f"forks{host}" for host in (0, 1)]
        self._servers = [
            self.start(host, server_command(sys.executable, path), stdin=subprocess.PIPE)
            for host, path in enumerate(sockets)
        ]
        if not self._ipv6:
            self._start_daemons()
        started = wait_until(lambda: all(path.exists() for path in sockets), patience(60))
        assert started, "the fork servers of the cluster did not start"

    def _start_daemons(self) -> None:
        for host in (0, 1):
            self.start_sshd(host)
        reach = ["ssh", *self.ssh_args, "-o", "BatchMode=yes", self.addresses[1], "true"]
        answers = wait_until(lambda: self.run(0, reach, timeout=10)[0] == 0, pause=0.2)
        assert answers, f"sshd did not come up: {(self.folder / 'sshd1.log').read_text()}"
