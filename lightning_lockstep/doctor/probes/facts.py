"""Programs that test this host and its libraries for the doctor, which imports neither torch nor DeepSpeed nor MPI.

python -m lightning_lockstep.doctor.probes.facts NAME [ARGUMENT ...]
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
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning_lockstep._text import first_line
from lightning_lockstep.deepspeed.build_tools import find_build_locks, missing_tools

# -- Two processes that add numbers through shared memory, again and again, as ranks of one host do --
# A kernel on which that hangs never lets this end; the doctor ends it then.

_ROUNDS, _VALUES = 200, 4096


def shared_memory() -> dict[str, Any]:
    """Let two processes add, and return how often."""
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
    return {"rounds": _ROUNDS, "values": _VALUES}


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
# The arguments are folders in which libraries of CUDA lie.

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


def build_tools() -> dict[str, Any]:
    """Return what can be linked, which tools are missing, and which locks were left behind."""
    folders = sys.argv[1:]
    programs = {**_PROGRAMS, **(_CUDA_PROGRAMS if folders else {})}
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(len(programs)) as pool:
        among = [f"-L{folder}" for folder in folders]
        jobs = {
            name: pool.submit(_link, Path(work, name), source, [*flags, *among])
            for name, (source, flags) in programs.items()
        }
        links = {name: job.result() for name, job in jobs.items()}
    return {
        "links": links,
        "missing": missing_tools(),
        "locks": find_build_locks(_extensions()),
    }


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


# -- What torch reports about the CUDA devices: what it was built for, and each device's properties --
# With ``--speed`` a short matrix product on each, one after the other.

_SIZE, _WARM_UP, _PRODUCTS = 4096, 3, 10


def torch_devices() -> dict[str, Any]:
    """Return what torch knows."""
    # As nvidia-smi numbers them; looked at when torch first asks for devices.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    import torch

    measure, count = "--speed" in sys.argv[1:], torch.cuda.device_count()
    usable = range(count if torch.cuda.is_available() else 0)
    return {
        "architectures": torch.cuda.get_arch_list(),
        "devices": [_device(index, measure) for index in usable],
    }


def _device(index: int, measure: bool) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "capability": [properties.major, properties.minor],
        **(_speed(index) if measure else {}),
    }


def _speed(index: int) -> dict[str, Any]:
    """Return the speed of a product of float16 matrices [operations/s], or why there is none."""
    import torch

    try:
        device = torch.device("cuda", index)
        matrix = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.float16)
        for _ in range(_WARM_UP):
            matrix @ matrix
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(_PRODUCTS):
            matrix @ matrix
        torch.cuda.synchronize(device)
        return {"speed": _PRODUCTS * 2 * _SIZE**3 / (time.perf_counter() - began)}
    except RuntimeError as error:  # out of memory, a device in use by somebody alone, no kernel for it
        return {"error": first_line(error)}


# -- Which devices torch-xla finds --


def xla_devices() -> dict[str, Any]:
    """Return their type and number."""
    from lightning_lockstep.xla.runtime import XLARuntime

    runtime = XLARuntime("lockstep-doctor")
    return {"device_type": runtime.device_type, "devices": runtime.num_devices}


# -- Whether DeepSpeed can be imported, and which of its operations are installed --


def deepspeed_import() -> dict[str, Any]:
    """Return its accelerator, and the operations that are built or have a builder."""
    from lightning_lockstep.deepspeed.build_tools import OPS
    from lightning_lockstep.deepspeed.importing import import_deepspeed
    from lightning_lockstep.errors import LockstepError

    try:
        import_deepspeed(None)
    except LockstepError as error:
        sys.exit(f"{error}")
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops  # those that were built ahead of time

    builders = {name: get_accelerator().create_op_builder(builder) for name, builder in OPS.items()}
    # Where an accelerator lacks an operation, that of the CPU gives a builder of nothing.
    known = [name for name, builder in builders.items() if builder is not None and builder.name == name]
    return {
        "accelerator": get_accelerator().device_name(),
        "operations": known,
        "built": [name for name in known if installed_ops.get(name)],
    }


# -- Which MPI library mpi4py loads: asked without starting MPI, which would need its launcher --


def mpi_library() -> dict[str, Any]:
    """Return vendor and version of the library."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return {
        "mpi4py": mpi4py.__version__,
        "vendor": MPI.get_vendor()[0],
        "library": MPI.Get_library_version().splitlines()[0].strip("\0 "),
    }


# -- The program --

PROBES = {
    probe.__name__: probe
    for probe in (shared_memory, build_tools, torch_devices, xla_devices, deepspeed_import, mpi_library)
}

if __name__ == "__main__":
    found = PROBES[sys.argv.pop(1)]()
    sys.stdout.write(json.dumps(found) + "\n")
