"""The one place that imports DeepSpeed, with what mends an import that fails, and that builds its operations."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from lightning_lockstep._settings import restore_variables
from lightning_lockstep._text import say
from lightning_lockstep.deepspeed.config_parsing import section
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.coordination.communicator import in_rank_order
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError

_VARIABLE = "DS_ACCELERATOR"
# Operations of torch.distributed that DeepSpeed 0.19 calls, and torch 2.13 has renamed.
_EARLIER_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")
#: The command that says what of CUDA, its compiler or ninja is missing, and how to install it.
DOCTOR = "lockstep-doctor cuda deepspeed"
_REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps deepspeed"


def import_deepspeed(device_type: str | None) -> ModuleType:  # None: DeepSpeed chooses
    """Import DeepSpeed with the accelerator of this run, and return it."""
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


# -- Operations that are compiled when they are first used: one rank of a node builds, then the others load --

# Types of DeepSpeed's optimizers, with the builder of the op that each needs on the device, and where it is offloaded.
_BUILDERS = {
    "adagrad": (None, "CPUAdagradBuilder"),
    "adam": ("FusedAdamBuilder", "CPUAdamBuilder"),
    "adamw": ("FusedAdamBuilder", "CPUAdamBuilder"),
    "lamb": ("FusedLambBuilder", "FusedLambBuilder"),
    "lion": ("FusedLionBuilder", "CPULionBuilder"),
    "muon": (None, "CPUAdamBuilder"),
}
# A build that takes longer is announced [s].
_QUICK = 3.0
# Lines of a failed build that are shown.
_SHOWN = 6


def needed_builders(config: Mapping[str, Any]) -> list[str]:
    """Return the builders of the ops without which a fit with this configuration cannot begin."""
    optimizer, zero = section(config, "optimizer"), section(config, "zero_optimization")
    devices = [section(zero, name).get("device") for name in ("offload_optimizer", "offload_param")]
    on_device, offloaded = _BUILDERS.get(str(optimizer.get("type")).lower(), (None, None))
    if section(optimizer, "params").get("torch_adam") is True:
        on_device = offloaded = None
    builder = offloaded if devices[0] in ("cpu", "nvme") else on_device
    return [*([builder] if builder else []), *(["AsyncIOBuilder"] if "nvme" in devices else [])]


def load_ops(builders: Sequence[str], timeout: float) -> None:
    """Load ops, on each node one rank after the other, of which the first builds them; ranks: all, together."""
    if not builders:
        return
    # No collective is open while a rank builds, and if it fails there the other ranks are told and do not try.
    with in_rank_order(per_node=True, timeout=timeout):
        for builder in builders:
            _load(builder)


def _load(builder: str) -> None:
    from deepspeed.accelerator import get_accelerator

    communicator, op = current_communicator(), get_accelerator().create_op_builder(builder)
    who = f"rank {communicator.rank} on {communicator.host}"
    if op is None:
        raise LaunchError(f"DeepSpeed's accelerator {get_accelerator().device_name()!r} has no {builder}.")
    text = (
        f"lightning-lockstep: {who} builds DeepSpeed's op {op.name}, or waits for another build of it. If none runs,"
        " `lockstep-doctor deepspeed` says how to go on."
    )
    announcement = threading.Timer(_QUICK, say, [text])
    announcement.daemon = True
    announcement.start()
    try:
        op.load(verbose=False)
    except Exception as error:  # of a compiler, of the loader, of DeepSpeed
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "undefined reference" in line]
        shown = "\n  ".join((telling or lines)[:_SHOWN])
        what = f"could not build DeepSpeed's op {op.name} ({type(error).__name__})"
        raise LaunchError(f"{who} {what}:\n  {shown}\nFix it with: {DOCTOR}") from error
    finally:
        announcement.cancel()
