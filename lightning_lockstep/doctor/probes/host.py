"""Programs that test this host for the doctor, without torch and DeepSpeed: its shared memory, its tools for builds.

python -m lightning_lockstep.doctor.probes.host NAME [ARGUMENT ...]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_lockstep.deepspeed.build_tools import find_build_locks, missing_tools

# -- Two processes that add numbers through shared memory, again and again, as ranks of one host do --
# A kernel on which that hangs never lets this end; the doctor ends it then.

_ROUNDS, _VALUES = 200, 4096


def shared_memory() -> None:
    """Let two processes add, and print how often."""
    context = multiprocessing.get_context("fork")
    memory = context.RawArray("d", 2 * _VALUES)
    barrier, wrong = context.Barrier(2), context.Value("i", 0)
    ranks = [context.Process(target=_add, args=(rank, memory, barrier, wrong)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if wrong.value or any(rank.exitcode for rank in ranks):
        sys.exit(
            f"{wrong.value} of {_ROUNDS} sums were wrong, exit codes {[rank.exitcode for rank in ranks]}"
        )
    sys.stdout.write(json.dumps({"rounds": _ROUNDS, "values": _VALUES}) + "\n")


def _add(rank: int, memory: Any, barrier: Any, wrong: Any) -> None:
    """Write this rank's values, add them to the other's, and compare the sum with what it must be."""
    own = slice(rank * _VALUES, (rank + 1) * _VALUES)
    for number in range(_ROUNDS):
        memory[own] = array("d", [float(number + rank)] * _VALUES)
        barrier.wait()
        total = sum(memory[:_VALUES]) + sum(memory[_VALUES:])
        barrier.wait()
        if total != _VALUES * (2 * number + 1):
            with wrong.get_lock():
                wrong.value += 1


# -- What builds of DeepSpeed's operations need of this host, tested by compiling and linking small programs --
# It imports neither torch nor DeepSpeed. The arguments are folders in which libraries of CUDA lie.

_LONGEST = 20.0
# What is tested -> a program that needs it, and what it is linked with.
_PROGRAMS = {
    "python": ("#include <Python.h>\nint main() { return Py_IsInitialized(); }", []),
    "openmp": ("#include <omp.h>\nint main() { return omp_get_max_threads() < 0; }", ["-fopenmp"]),
    "aio": ("#include <libaio.h>\nint main() { io_context_t c = 0; return io_submit(c, 0, 0); }", ["-laio"]),
}
_CUDA_PROGRAMS = {
    "cudart": (
        'extern "C" int cudaGetDeviceCount(int*);\nint main() { return cudaGetDeviceCount(0); }',
        ["-lcudart"],
    ),
    "curand": (
        'extern "C" int curandGetVersion(int*);\nint main() { return curandGetVersion(0); }',
        ["-lcurand"],
    ),
}


def build_tools() -> None:
    """Print what can be linked, which tools are missing, and which locks were left behind."""
    folders = sys.argv[1:]
    programs = {**_PROGRAMS, **(_CUDA_PROGRAMS if folders else {})}
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(len(programs)) as pool:
        jobs = {
            name: pool.submit(
                _link, Path(work, name), source, [*flags, *(f"-L{folder}" for folder in folders)]
            )
            for name, (source, flags) in programs.items()
        }
        links = {name: job.result() for name, job in jobs.items()}
    facts: dict[str, Any] = {
        "links": links,
        "missing": missing_tools(["cpu_adam"]),
        "locks": [
            {"text": str(lock), "path": str(lock.path), "is_stale": lock.is_stale}
            for lock in find_build_locks(_extensions())
        ],
    }
    sys.stdout.write(json.dumps(facts) + "\n")


def _link(target: Path, source: str, flags: list[str]) -> str:
    """Compile and link a program; return the error of the compiler if that fails."""
    file = target.with_suffix(".cpp")
    file.write_text(source + "\n")
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    more = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    include = f"-I{sysconfig.get_paths()['include']}"
    # A library of Python need not be there: extensions are not linked with it.
    lenient = ["-shared", "-fPIC"] if target.name == "python" else []
    command = [*compiler, *lenient, str(file), "-o", str(target), include, *more[0], *flags, *more[1]]
    # In the group of this process, which the doctor ends as a whole when a probe takes too long.
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LONGEST)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = [line for line in done.stderr.splitlines() if "error" in line or "cannot find" in line]
    if done.returncode == 0:
        return ""
    return re.sub(r"^.*?(?=fatal error|error|cannot find)", "", lines[0]) if lines else "the compiler failed"


def _extensions() -> Path:
    """Return the folder of torch's extensions, as torch chooses it."""
    # Not Path.home(), which raises where the user of a container has no name.
    cache = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/")) / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions"))


# -- The program --

PROBES = {"shared_memory": shared_memory, "build_tools": build_tools}

if __name__ == "__main__":
    PROBES[sys.argv.pop(1)]()
