"""What the installed torch was built for, without importing it where that can be read."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_lockstep.doctor.machines.machine import Machine

__all__ = ["TorchBuild", "torch_build"]


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch."""

    version: str  # empty where it is not installed
    cuda: str = ""  # CUDA that it was built with, such as ``12.8``; empty without
    is_rocm: bool = False
    is_known: bool = True  # its files name what it was built for


def torch_build(machine: Machine) -> TorchBuild:
    """Return what is known of torch from its files."""
    installed = machine.python.packages.get("torch", "")
    text = machine.read_text(f"{machine.python.folder_of('torch')}/torch/version.py") or ""
    version = _assigned(text, "__version__") or installed
    cuda = _assigned(text, "cuda")
    if not cuda and (match := re.search(r"\+cu(\d+)(\d)\b", version)):
        cuda = f"{match[1]}.{match[2]}"
    is_rocm = bool(_assigned(text, "hip")) or "+rocm" in version
    # The version of metadata has no local part where torch comes from PyPI, and then does not name CUDA.
    return TorchBuild(version, cuda, is_rocm, is_known=bool(text) or "+" in version)


def _assigned(text: str, name: str) -> str:
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"\n]*)['\"]", text, re.MULTILINE)
    return match[1] if match else ""
