"""The one place that imports DeepSpeed, and what is done about an import that fails or has side effects.

DeepSpeed chooses its accelerator while it is imported: from ``DS_ACCELERATOR``, or by looking for devices. It looks
for CUDA's compiler too, since it asks each of its ops whether it could be built here; in older releases the
``import`` fails where there is none. Both are settled before a user sees them.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from lightning_lockstep._doors.deepspeed_internals import (
    accelerator_name,
    has_other_cuda,
    lacks_cuda,
    make_accelerator,
)
from lightning_lockstep._settings import restore_variables
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError

_log = logging.getLogger(__name__)

_VARIABLE = "DS_ACCELERATOR"
# Accelerators of DeepSpeed whose devices torch calls by another name.
_DEVICE_OF = {"supa": "cuda", "klxpu": "cuda"}
# Operations of torch.distributed that DeepSpeed 0.19 calls, and torch 2.13 has renamed.
_EARLIER_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")
_REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps deepspeed"


def import_deepspeed(device_type: str | None) -> ModuleType:  # None: DeepSpeed chooses
    """Import DeepSpeed with the accelerator of this run, and return it."""
    wanted = _accelerator(device_type)
    is_first = "deepspeed" not in sys.modules
    with warnings.catch_warnings(), _variable(wanted):  # urllib3, which comes along, has its own filters
        try:
            deepspeed = importlib.import_module("deepspeed")
        except Exception as error:  # DeepSpeed's own errors of CUDA derive from Exception
            explained = _explained(error)
            if explained is None:
                raise
            raise explained from error
    if is_first:
        _ignore_names_that_torch_has_replaced()
    elif wanted is not None:
        _switch(wanted)
    return deepspeed


def cuda_trouble(error: BaseException) -> str | None:
    """Return the command that fixes CUDA, ninja or a shared library; ``None`` for any other error."""
    text = str(error)
    if text.startswith("Error building extension"):
        return None  # what the compiler said, with its command
    if has_other_cuda(error):
        return _other_toolkit()
    if lacks_cuda(error) or "nvcc" in text or "CUDA_HOME" in text:
        return _toolkit()
    if "ninja" in text.lower():
        return "pip install --force-reinstall ninja"
    if isinstance(error, ImportError) and ("shared object" in text or "undefined symbol" in text):
        return _REINSTALL
    return None


def _accelerator(device_type: str | None) -> str | None:
    """Return the accelerator that DeepSpeed must have, ``None`` where it may choose."""
    given = os.environ.get(_VARIABLE)
    if given is not None:
        if device_type is not None and device_type not in (given, _DEVICE_OF.get(given)):
            raise ConfigurationError(
                f"The environment variable {_VARIABLE} is {given!r}, and the devices of this run are {device_type!r}."
                f" Expected the same of both: unset {_VARIABLE}, or choose accelerator={given!r} for the Trainer."
            )
        return given
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "device_type='cuda': expected 'cpu', since torch finds no usable CUDA device here."
            " `nvidia-smi` shows whether the driver does."
        )
    if device_type is None and not torch.accelerator.is_available():
        return "cpu"
    return device_type


@contextmanager
def _variable(wanted: str | None) -> Iterator[None]:
    """Tell DeepSpeed its accelerator; it looks once, so that other programs need not see it."""
    before = {_VARIABLE: os.environ.get(_VARIABLE)}
    if wanted is not None:
        os.environ[_VARIABLE] = wanted
    try:
        yield
    finally:
        restore_variables(before)


def _ignore_names_that_torch_has_replaced() -> None:
    """Keep torch from saying, for every operation, that DeepSpeed calls it by an earlier name."""
    for name in _EARLIER_NAMES:
        message = rf".torch\.distributed\.{name}. is deprecated"
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)


def _switch(wanted: str) -> None:
    """Give DeepSpeed, which was imported before, the accelerator of this run."""
    accelerator = importlib.import_module("deepspeed.accelerator")
    before = accelerator_name(accelerator.get_accelerator())
    if before == wanted:
        return
    try:
        accelerator.set_accelerator(make_accelerator(wanted))
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"device_type={wanted!r}: expected an accelerator that DeepSpeed knows ({_one_line(error)})."
        ) from error
    _log.warning(
        "DeepSpeed was imported before with the accelerator %r and now has %r. Ops that were looked up before stay"
        " those of %r: set DS_ACCELERATOR=%s, or import it later.",
        before,
        wanted,
        before,
        wanted,
    )


def _explained(error: Exception) -> Exception | None:
    """Return what is raised instead of an error of the import, ``None`` where nothing is known about it."""
    needed_for = "The DeepSpeed strategy"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        # A part of DeepSpeed itself that is missing is a broken installation.
        if package != "deepspeed" or error.name == "deepspeed":
            return MissingExtraError(package, extra="deepspeed", needed_for=needed_for)
    if isinstance(error, ValueError) and _VARIABLE in str(error):
        return ConfigurationError(f"DeepSpeed cannot use its accelerator: {_one_line(error)}.")
    remedy = cuda_trouble(error)
    if remedy is None and isinstance(error, ImportError):
        remedy = _REINSTALL
    if remedy is None:
        return None
    return LaunchError(
        f"DeepSpeed is installed and cannot be imported: {type(error).__name__}: {_one_line(error)}."
        f" Fix it with: {remedy}"
    )


def _toolkit() -> str:
    """Return what installs CUDA's compiler in the version that torch was built with."""
    version = torch.version.cuda
    if version is None:
        return f"export {_VARIABLE}=cpu  # this torch is built without CUDA"
    return f"apt-get install cuda-toolkit-{version.replace('.', '-')} && export CUDA_HOME=/usr/local/cuda-{version}"


def _other_toolkit() -> str:
    version = torch.version.cuda
    if version is not None and Path(f"/usr/local/cuda-{version}/bin/nvcc").exists():
        return f"export CUDA_HOME=/usr/local/cuda-{version}"
    return _toolkit()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text.rstrip(".") if len(text) <= 300 else f"{text[:300]} ..."
