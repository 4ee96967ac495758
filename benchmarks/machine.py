"""What a reader must know of the machine to make sense of a figure."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

_PACKAGES = ("torch", "lightning", "numpy", "mpi4py", "accelerate", "transformers", "torch-xla")


def facts(quick: bool) -> dict[str, str]:
    """Machine, versions and circumstances, as label to text."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "measured": datetime.date.today().isoformat()
        + (" (quick: too few rounds to quote)" if quick else ""),
        "processor": f"{_processor()}, {usable} usable cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerator": _accelerator(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in _versions()),
        "load at the end (1, 5, 15 min)": load,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _accelerator() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _versions() -> list[tuple[str, str]]:
    import lightning_lockstep

    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    theirs = [(name, importlib.metadata.version(name)) for name in _PACKAGES if name in installed]
    # From the module: run from the repository, it is the source tree that was measured.
    return [("lightning-lockstep", lightning_lockstep.__version__), *theirs]
