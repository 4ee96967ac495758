"""What torch reports about the CUDA devices: what it was built for, and each device's properties.

With ``--speed`` a short matrix product on each, one after the other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from lightning_lockstep._text import first_line

# As nvidia-smi numbers them; looked at when torch first asks for devices.
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"

_SIZE, _WARM_UP, _PRODUCTS = 4096, 3, 10


def main() -> None:
    """Print what torch knows."""
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


if __name__ == "__main__":
    main()
