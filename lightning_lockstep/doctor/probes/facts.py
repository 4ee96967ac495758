"""Programs that test this host and its libraries for the doctor, which imports neither torch nor DeepSpeed nor MPI.

python -m lightning_lockstep.doctor.probes.facts NAME [ARGUMENT ...]
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from array import array
from contextlib import redirect_stdout, suppress
from typing import Any

from lightning_lockstep._text import first_line

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
        codes = [rank.exitcode for rank in ranks]
        sys.exit(f"{wrong.value} of {_ROUNDS} sums were wrong, exit codes {codes}")
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


# -- The architectures that torch was built for; with ``--speed`` a short matrix product on each CUDA device --

_SIZE, _WARM_UP, _PRODUCTS = 4096, 3, 10


def torch_devices() -> dict[str, Any]:
    import torch

    is_timed = torch.cuda.is_available() and "--speed" in sys.argv[1:]
    speeds = [_speed(index) for index in range(torch.cuda.device_count())] if is_timed else []
    return {"architectures": torch.cuda.get_arch_list(), "devices": speeds}


def _speed(index: int) -> dict[str, Any]:
    """Return a device's address on the PCI bus, and the speed of a product of float16 matrices [operations/s]."""
    import torch

    found: dict[str, Any] = {}
    try:
        gpu: Any = torch.cuda.get_device_properties(index)
        # As nvidia-smi writes it. CUDA's own numbers are others if CUDA_VISIBLE_DEVICES hides or orders devices.
        found["bus_id"] = f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        device = torch.device("cuda", index)
        matrix = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.float16)
        for _ in range(_WARM_UP):
            matrix @ matrix
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(_PRODUCTS):
            matrix @ matrix
        torch.cuda.synchronize(device)
        found["speed"] = _PRODUCTS * 2 * _SIZE**3 / (time.perf_counter() - began)
    except RuntimeError as error:  # out of memory, a device in use by somebody alone, no kernel for it
        found["error"] = first_line(error)
    return found


# -- Which devices torch-xla finds --


def xla_devices() -> dict[str, Any]:
    from lightning_lockstep.xla.runtime import XLARuntime, check_torch_xla

    check_torch_xla("lockstep-doctor")
    runtime = XLARuntime()
    return {"device_type": runtime.device_type, "devices": runtime.num_devices}


# -- Whether DeepSpeed can be imported, and which of its operations are installed --

# The operations that training uses.
_CPU_OPERATIONS = ("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "deepspeed_shm_comm", "pin_memory")
_OPERATIONS = (*_CPU_OPERATIONS, "fused_adam", "fused_lamb", "fused_lion", "quantizer", "utils")


def deepspeed_import() -> dict[str, Any]:
    """Return its accelerator, and the operations: those that have a builder, are built, or can be."""
    from lightning_lockstep.deepspeed.importing import import_deepspeed
    from lightning_lockstep.errors import LockstepError

    try:
        import_deepspeed(None)
    except LockstepError as error:
        sys.exit(f"{error}")
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops  # those that were built ahead of time
    from deepspeed.ops.op_builder.all_ops import ALL_OPS  # the builders that this accelerator has

    known = sorted(name for name in _OPERATIONS if name in ALL_OPS)
    return {
        "accelerator": get_accelerator().device_name(),
        "operations": known,
        "built": [name for name in known if installed_ops.get(name)],
        "buildable": [name for name in known if _can_be_built(ALL_OPS[name])],
    }


def _can_be_built(builder: Any) -> bool:
    with suppress(Exception), redirect_stdout(sys.stderr):  # such as that of a CUDA of another version
        return bool(builder.is_compatible(verbose=False))
    return False


# -- Which MPI library mpi4py loads: asked without starting MPI, which would need its launcher --


def mpi_library() -> dict[str, Any]:
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return {
        "mpi4py": mpi4py.__version__,
        "vendor": MPI.get_vendor()[0],
        "library": MPI.Get_library_version().splitlines()[0].strip("\0 "),
    }


# -- The program --

PROBES = {probe.__name__: probe for probe in (shared_memory, torch_devices, xla_devices, deepspeed_import, mpi_library)}

if __name__ == "__main__":
    found = PROBES[sys.argv.pop(1)]()
    sys.stdout.write(json.dumps(found) + "\n")
