"""What a build of DeepSpeed's operations needs of this host, and the locks of builds; for the doctor, without torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from lightning_lockstep._text import time_in_words

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
# No op is built for longer than this [s].
_LONGEST_BUILD = 600.0


def missing_tools() -> list[str]:
    """Return what is missing here for a build, a sentence each that ends with the command that brings it."""
    return [sentence for sentence in (_compiler(), _ninja(), _headers()) if sentence is not None]


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


def _install(debian: str, red_hat: str) -> str:
    if shutil.which("apt-get") is None and shutil.which("dnf") is not None:
        return f"dnf install {red_hat}"
    return f"apt-get install {debian}"


def locked_by_kernel() -> bool:
    """Return whether the kernel releases a lock of the installed torch with the process, though its file stays."""
    return Version(version("torch")).release >= (2, 15)


def find_build_locks(root: Path) -> list[dict[str, Any]]:
    """Return the files under which torch builds extensions; a killed build leaves one, and whoever comes next waits."""
    locks: list[dict[str, Any]] = []
    if locked_by_kernel():
        return locks
    # One folder for each op; below torch's own root one more level for the versions of Python and CUDA.
    for path in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        with suppress(FileNotFoundError):  # that build has ended meanwhile
            age = max(0.0, time.time() - path.stat().st_mtime)
            text = f"{path.parent.name}: {path} (made {time_in_words(age)} ago)"
            locks.append({"text": text, "path": str(path), "is_stale": age > _LONGEST_BUILD})
    return locks
