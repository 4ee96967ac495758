"""The one place that imports DeepSpeed, with the accelerator of this run, and what mends an import that fails."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from types import ModuleType

import torch

from lightning_lockstep._settings import restore_variables
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError

_VARIABLE = "DS_ACCELERATOR"
# Operations of torch.distributed that DeepSpeed 0.19 calls, and torch 2.13 has renamed.
_EARLIER_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")
#: The command that says what of CUDA, its compiler or ninja is missing, and how to install it.
DOCTOR = "lockstep-doctor cuda deepspeed"
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
    remedy = _REINSTALL if isinstance(error, ImportError) else DOCTOR
    shown = text.rstrip(".") if len(text) <= 300 else f"{text[:300]} ..."
    return LaunchError(
        f"DeepSpeed is installed but cannot be imported: {type(error).__name__}: {shown}. Fix it with: {remedy}"
    )
