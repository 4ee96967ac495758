"""What a build of DeepSpeed's operations needs of this host, and locks that killed builds have left."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

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
# it forever, without a message.

_NAME = "lock"
# Nothing is built for longer than this; counts where the processes of other hosts or users may be at work [s].
_LONGEST_BUILD = 2 * 3600.0
_COMPILERS = re.compile(
    r"(.*-)?(ninja|cc|c\+\+|gcc|g\+\+|cc1plus|clang|clang\+\+|icpx|nvcc|cicc|cudafe\+\+|ptxas|fatbinary|hipcc|as|ld"
    r"|collect2)(-\d+)?"
)
_SEVERAL_HOSTS = re.compile("nfs|lustre|gpfs|beegfs|ceph|cifs|smb|fuse|9p|virtiofs|afs")


@dataclass(frozen=True)
class BuildLock:
    path: Path
    op: str  # such as cpu_adam
    age: float  # since the file was made [s]
    owner_pid: int | None  # holds it open or works in its folder; None: nobody here, or another user's
    is_stale: bool  # nobody works on it; where another host or user may, only after two hours

    def __str__(self) -> str:
        owner = "no process of this host" if self.owner_pid is None else f"process {self.owner_pid}"
        return f"{self.op}: {self.path} (made {time_in_words(self.age)} ago, held by {owner})"


def build_folder(op: str) -> Path:
    """Return the folder in which torch builds an extension, made if it is not there."""
    from lightning_lockstep._doors.torch_internals import extension_folder

    return Path(extension_folder(op))


def find_build_locks(root: Path | None = None, *, ops: Collection[str] | None = None) -> list[BuildLock]:
    """Return the locks of all builds, those at work and those that were left behind."""
    root = _root() if root is None else root
    # One folder for each op; below torch's own root one more level for the versions of Python and CUDA.
    found = [*root.glob(f"*/{_NAME}"), *root.glob(f"*/*/{_NAME}")]
    if ops is not None:
        found = [path for path in found if path.parent.name in ops]
    looked_at = time.time()
    owners = _owners(found) if found else {}
    locks = [_lock(path, owners.get(path), looked_at) for path in sorted(found)]
    return [lock for lock in locks if lock is not None]


def remove_stale_locks(
    consent: bool, root: Path | None = None, *, ops: Collection[str] | None = None
) -> list[BuildLock]:
    """Remove the locks whose builds are over, and return them; on one rank of a host."""
    stale = [lock for lock in find_build_locks(root, ops=ops) if lock.is_stale]
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


def _root() -> Path:
    from torch.utils import cpp_extension

    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given or cpp_extension.get_default_build_root())


def _lock(path: Path, owner: int | None, looked_at: float) -> BuildLock | None:
    """Return what is known of a lock, ``None`` if its build has ended since its owner was looked for."""
    try:
        state = path.stat()
    except OSError:
        return None
    age = max(0.0, time.time() - state.st_mtime)
    is_of_then = state.st_mtime < looked_at  # otherwise it is that of a later build, which was not looked for
    sees_all = state.st_uid == os.geteuid() and not _is_of_several_hosts(path)
    is_stale = owner is None and is_of_then and (sees_all or age > _LONGEST_BUILD)
    return BuildLock(path, path.parent.name, age, owner, is_stale)


def _owners(locks: list[Path]) -> dict[Path, int]:
    """Return who holds each lock open, else who works in its folder (ninja and the compilers do)."""
    by_real_path = {str(path.resolve()): path for path in locks}
    by_real_folder = {str(path.parent.resolve()): path for path in locks}
    holders: dict[Path, int] = {}
    workers: dict[Path, int] = {}
    for process in psutil.process_iter():
        for name in _open_files(process):
            if name in by_real_path:
                holders.setdefault(by_real_path[name], process.pid)
        folder = _workplace(process)
        if folder in by_real_folder:
            workers.setdefault(by_real_folder[folder], process.pid)
    return {**workers, **holders}


def _open_files(process: psutil.Process) -> Iterator[str]:
    with suppress(psutil.Error, OSError):
        yield from (file.path for file in process.open_files())


def _workplace(process: psutil.Process) -> str | None:
    """Return where a program of a build works; it runs on for a while if the process that started it is killed."""
    with suppress(psutil.Error, OSError):
        return str(process.cwd()) if _COMPILERS.fullmatch(process.name()) else None
    return None


def _is_of_several_hosts(path: Path) -> bool:
    real = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    nearest = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    return nearest is not None and _SEVERAL_HOSTS.match(nearest.fstype.lower()) is not None
