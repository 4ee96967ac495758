"""What a build of DeepSpeed's operations needs of this host, and locks that killed builds have left."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from packaging.version import Version

from lightning_lockstep._doors.deepspeed_internals import finds_function, make_op_builder
from lightning_lockstep._text import time_in_words
from lightning_lockstep.errors import LaunchError

# -- The ops of DeepSpeed, and what their builds need of this host, looked for before the build --

#: The ops that training uses, and what DeepSpeed calls their builders.
OPS = {
    "async_io": "AsyncIOBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
    "fused_lamb": "FusedLambBuilder",
    "fused_lion": "FusedLionBuilder",
    "pin_memory": "PinMemoryBuilder",
    "quantizer": "QuantizerBuilder",
    "utils": "UtilsBuilder",
}


def missing_tools(ops: Sequence[str]) -> list[str]:
    """Return what is missing here for a build, a sentence each that ends with the command that brings it."""
    compiler = _compiler()
    missing = [compiler, _ninja(), _headers()]
    if "async_io" in ops and compiler is None:
        missing.append(_libaio())
    return [sentence for sentence in missing if sentence is not None]


def _compiler() -> str | None:
    command = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]
    if shutil.which(command) is not None:
        return None
    if "CXX" in os.environ:
        return f"The C++ compiler {command!r} that CXX names is not there: unset CXX, or {_install('g++', 'gcc-c++')}"
    return f"There is no C++ compiler: {_install('g++', 'gcc-c++')}"


def _ninja() -> str | None:
    if shutil.which("ninja") is not None:
        return None
    # Python was started by its path: the programs of its environment are not among those of the shell.
    beside = Path(sys.executable).parent
    if (beside / "ninja").exists():
        return f"ninja is installed in {beside} and not found: export PATH={beside}:$PATH"
    return "There is no ninja: pip install ninja"


def _headers() -> str | None:
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if header.exists():
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"Python's headers are missing ({header}): {_install(f'python{version}-dev', f'python{version}-devel')}"


def _libaio() -> str | None:
    builder = make_op_builder("AsyncIOBuilder")
    if builder is None or finds_function(builder, "io_submit", "aio"):
        return None
    return f"The library aio and its headers are missing: {_install('libaio-dev', 'libaio-devel')}"


def _install(debian: str, red_hat: str) -> str:
    if shutil.which("apt-get") is None and shutil.which("dnf") is not None:
        return f"dnf install {red_hat}"
    return f"apt-get install {debian}"


# -- The locks that builds of extensions leave behind --
# Torch builds an extension under a file called ``lock`` in its folder, which the building process makes,
# holds open and removes. If that process is killed the file stays, and whoever needs the op next waits for
# it forever, without a message. From 2.15 on the file always stays, and the kernel locks it for the process.

_NAME = "lock"
# Nothing is built for longer than this; counts where a process of another host may be at work [s].
_LONGEST_BUILD = 2 * 3600.0
# A build that ends closes its lock a moment before it removes it [s].
_REMOVAL = 0.2
_SEVERAL_HOSTS = re.compile("nfs|lustre|gpfs|beegfs|ceph|cifs|smb|fuse|9p|virtiofs|afs")


@dataclass(frozen=True)
class BuildLock:
    path: Path
    op: str  # such as cpu_adam
    age: float  # since the file was made [s]
    is_stale: bool  # nobody works on it; where another host may, only after two hours

    def __str__(self) -> str:
        owner = ", held by no process of this host" if self.is_stale else ""
        return f"{self.op}: {self.path} (made {time_in_words(self.age)} ago{owner})"


def build_folder(op: str) -> Path:
    """Return the folder in which torch builds an extension, made if it is not there."""
    from lightning_lockstep._doors.torch_internals import extension_folder

    return Path(extension_folder(op))


@functools.cache
def locked_by_kernel() -> bool:
    """Return whether a lock of the installed torch ends with the process that holds it."""
    try:
        return Version(version("torch")).release >= (2, 15)
    except PackageNotFoundError:
        return False


def find_build_locks(root: Path, *, ops: Collection[str] | None = None) -> list[BuildLock]:
    """Return the locks of all builds, those at work and those that were left behind."""
    locks = []
    # One folder for each op; below torch's own root one more level for the versions of Python and CUDA.
    for path in sorted([*root.glob(f"*/{_NAME}"), *root.glob(f"*/*/{_NAME}")]):
        if (ops is None or path.parent.name in ops) and (not locked_by_kernel() or _is_locked(path)):
            with suppress(FileNotFoundError):  # that build has ended meanwhile
                age = max(0.0, time.time() - path.stat().st_mtime)
                is_stale = not locked_by_kernel() and _is_stale(path, age)
                locks.append(BuildLock(path, path.parent.name, age, is_stale))
    return locks


def remove_stale_locks(consent: bool, root: Path, *, ops: Collection[str] | None = None) -> list[BuildLock]:
    """Remove the locks whose builds are over, and return them; on one rank of a host."""
    stale = [lock for lock in find_build_locks(root, ops=ops) if lock.is_stale]
    if stale:
        time.sleep(_REMOVAL)
        stale = [lock for lock in stale if lock.path.exists()]
    if stale and not consent:
        raise LaunchError(
            "Killed builds of extensions have left their lock files, for which every later run waits forever:\n"
            + "".join(f"  {lock}\n" for lock in stale)
            + "If no other host or container builds in that folder now, remove them with\n  rm "
            + " ".join(str(lock.path) for lock in stale)
            + "\nor let this package do so with remove_stale_locks=True."
        )
    for lock in stale:
        lock.path.unlink(missing_ok=True)
    return stale


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file of another user: torch says so
        return False
    return False


def _is_stale(path: Path, age: float) -> bool:
    # Linux grants a lease on a file only while no process of this host has it open, in whatever container. It ends
    # with the file object; whoever opens the file within it sends a signal, here one that is ignored by default.
    try:
        with path.open("rb") as file:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        sees_all = not _is_of_several_hosts(path)
    except BlockingIOError:
        return False
    except (OSError, AttributeError):  # the file of another user, a file system or a kernel without leases
        sees_all = False
    return sees_all or age > _LONGEST_BUILD


def _is_of_several_hosts(path: Path) -> bool:
    real = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    nearest = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    return nearest is not None and _SEVERAL_HOSTS.match(nearest.fstype.lower()) is not None
