"""The ops of DeepSpeed, and what their builds need of this host, looked for before the build."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from lightning_lockstep._doors.deepspeed_internals import finds_function, make_op_builder

__all__ = ["OPS", "missing_tools"]

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
