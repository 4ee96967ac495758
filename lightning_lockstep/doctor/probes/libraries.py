"""Programs that ask torch, torch-xla, DeepSpeed and MPI for the doctor, which imports none of them.

python -m lightning_lockstep.doctor.probes.libraries NAME [ARGUMENT ...]
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from lightning_lockstep._text import first_line

# -- What torch reports about the CUDA devices: what it was built for, and each device's properties --
# With ``--speed`` a short matrix product on each, one after the other.

_SIZE, _WARM_UP, _PRODUCTS = 4096, 3, 10


def torch_devices() -> None:
    """Print what torch knows."""
    # As nvidia-smi numbers them; looked at when torch first asks for devices.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    import torch

    measure = "--speed" in sys.argv[1:]
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "available": torch.cuda.is_available(),
        "architectures": torch.cuda.get_arch_list(),
        "devices": [_device(i, measure) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
    }
    sys.stdout.write(json.dumps(facts) + "\n")


def _device(index: int, measure: bool) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "memory": properties.total_memory,
        "processors": properties.multi_processor_count,
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


def xla_devices() -> None:
    """Print their type and number."""
    from lightning_lockstep.xla.runtime import XLARuntime

    runtime = XLARuntime("lockstep-doctor")
    sys.stdout.write(json.dumps({"device_type": runtime.device_type, "devices": runtime.num_devices}) + "\n")


# -- Whether DeepSpeed can be imported, and which of its operations are installed --


def deepspeed_import() -> None:
    """Print its version, its accelerator, and the operations that are built or have a builder."""
    from lightning_lockstep._doors.deepspeed_internals import is_installed, make_op_builder, op_name
    from lightning_lockstep.deepspeed.build_tools import OPS
    from lightning_lockstep.deepspeed.importing import import_deepspeed
    from lightning_lockstep.errors import LockstepError

    try:
        deepspeed = import_deepspeed(None)
    except LockstepError as error:
        sys.exit(f"{error}")
    from deepspeed.accelerator import get_accelerator

    builders = {name: make_op_builder(builder) for name, builder in OPS.items()}
    # Where an accelerator lacks an operation, that of the CPU gives a builder of nothing.
    known = [name for name, builder in builders.items() if builder is not None and op_name(builder) == name]
    facts = {
        "version": deepspeed.__version__,
        "accelerator": get_accelerator().device_name(),
        "operations": known,
        "built": [name for name in known if is_installed(name)],
    }
    sys.stdout.write(json.dumps(facts) + "\n")


# -- Which MPI library mpi4py loads: asked without starting MPI, which would need its launcher --


def mpi_library() -> None:
    """Print vendor and version of the library."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    print(  # noqa: T201
        json.dumps(
            {
                "mpi4py": mpi4py.__version__,
                "vendor": vendor,
                "version": ".".join(map(str, version)),
                "library": MPI.Get_library_version().splitlines()[0].strip("\0 "),
            }
        )
    )


# -- The program --

PROBES = {
    "torch_devices": torch_devices,
    "xla_devices": xla_devices,
    "deepspeed_import": deepspeed_import,
    "mpi_library": mpi_library,
}

if __name__ == "__main__":
    PROBES[sys.argv.pop(1)]()
