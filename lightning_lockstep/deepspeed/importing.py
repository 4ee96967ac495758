"""The one place that imports DeepSpeed, with the accelerator of this run, and what mends an import that fails."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

from lightning_lockstep._settings import restore_variables
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError

_VARIABLE = "DS_ACCELERATOR"
# Operations of torch.distributed that DeepSpeed 0.19 calls, and torch 2.13 has renamed.
_EARLIER_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")
_REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps deepspeed"


def import_deepspeed(device_type: str | None) -> ModuleType:  # None: DeepSpeed chooses
    """Import DeepSpeed with the accelerator of this run, and return it."""
    is_first = "deepspeed" not in sys.modules
    before = {_VARIABLE: os.environ.get(_VARIABLE)}
    wanted = device_type or (None if torch.accelerator.is_available() else "cpu")
    if wanted is not None:
        os.environ.setdefault(_VARIABLE, wanted)  # DeepSpeed looks at it once, while it is imported
    try:
        with warnings.catch_warnings():  # urllib3, which comes along, has its own filters
            deepspeed = importlib.import_module("deepspeed")
    except Exception as error:  # DeepSpeed's own errors of CUDA derive from Exception
        raise _explained(error) from error
    finally:
        restore_variables(before)
    if is_first:
        for name in _EARLIER_NAMES:  # or torch says so for every operation
            message = rf".torch\.distributed\.{name}. is deprecated"
            warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    has = deepspeed.get_accelerator().device_name()
    if device_type not in (None, has):
        raise ConfigurationError(
            f"DeepSpeed has the accelerator {has!r}, but the devices of this run are {device_type!r}: DeepSpeed"
            f" chooses once, when it is first imported. Set {_VARIABLE}={device_type} for this program."
        )
    return deepspeed


def cuda_trouble(error: BaseException) -> str | None:
    """Return the command that fixes CUDA, ninja or a shared library; ``None`` for any other error."""
    text, kind = str(error), type(error).__name__  # by its name: the import of its class may have failed
    if text.startswith("Error building extension"):
        return None  # what the compiler said, with its command
    if kind == "CUDAMismatchException" and Path(f"/usr/local/cuda-{torch.version.cuda}/bin/nvcc").exists():
        return f"export CUDA_HOME=/usr/local/cuda-{torch.version.cuda}"
    if kind in ("MissingCUDAException", "CUDAMismatchException") or "nvcc" in text or "CUDA_HOME" in text:
        return _toolkit()
    if "ninja" in text.lower():
        return "pip install --force-reinstall ninja"
    if isinstance(error, ImportError) and ("shared object" in text or "undefined symbol" in text):
        return _REINSTALL
    return None


def _explained(error: Exception) -> Exception:
    """Return what is raised instead of an error of the import."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        # A part of DeepSpeed itself that is missing is a broken installation.
        if package != "deepspeed" or error.name == "deepspeed":
            return MissingExtraError(package, extra="deepspeed", needed_for="The DeepSpeed strategy")
    text = " ".join(str(error).split())
    if isinstance(error, ValueError) and _VARIABLE in text:
        return ConfigurationError(f"DeepSpeed cannot use its accelerator: {text}")
    remedy = cuda_trouble(error) or (
        _REINSTALL if isinstance(error, ImportError) else "lockstep-doctor deepspeed"
    )
    shown = text.rstrip(".") if len(text) <= 300 else f"{text[:300]} ..."
    return LaunchError(
        f"DeepSpeed is installed but cannot be imported: {type(error).__name__}: {shown}. Fix it with: {remedy}"
    )


def _toolkit() -> str:
    """Return what installs CUDA's compiler in the version that torch was built with."""
    version = torch.version.cuda
    if version is None:
        return f"export {_VARIABLE}=cpu  # this torch is built without CUDA"
    return f"apt-get install cuda-toolkit-{version.replace('.', '-')} && export CUDA_HOME=/usr/local/cuda-{version}"
