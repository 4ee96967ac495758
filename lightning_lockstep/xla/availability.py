"""What is known of torch-xla and its devices without starting any: installed, its variables, TPUs, already in use."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError

__all__ = [
    "check_accelerator",
    "check_environment",
    "check_torch_xla",
    "check_untouched",
    "find_device_type",
    "has_devices",
    "has_libtpu",
    "num_tpu_chips",
]

# Variables that change what float32 means for a whole process, and what to write instead.
_REFUSED = {
    "XLA_USE_BF16": "precision=bf16-true",
    "XLA_DOWNCAST_BF16": "precision=bf16-true and the strategy's downcast_bf16=True",
    "XLA_USE_F16": "precision=bf16-true or bf16-mixed",
    "XLA_USE_FP16": "precision=bf16-true or bf16-mixed",
    "XLA_DOWNCAST_F16": "precision=bf16-true and the strategy's downcast_bf16=True",
    "XLA_DOWNCAST_FP16": "precision=bf16-true and the strategy's downcast_bf16=True",
}
_NO = ("", "0", "false")


def check_environment() -> None:
    """Refuse the variables that torch-xla has deprecated for 16 bits.

    They turn every float32 tensor of the process into 16 bits without its knowledge: metrics, logged means, counters.
    """
    found = [name for name in _REFUSED if os.environ.get(name, "").lower() not in _NO]
    if found:
        texts = [f"{name}={os.environ[name]}: expected {_REFUSED[name]} instead." for name in found]
        raise ConfigurationError(
            "These variables turn every float32 tensor into 16 bits, also metrics and what is logged, and torch-xla"
            f" has deprecated them. Unset them. {' '.join(texts)}"
        )


def check_torch_xla(needed_for: str) -> None:
    """Check that torch-xla is installed and not set to cast by itself; imports nothing."""
    check_environment()
    if importlib.util.find_spec("torch_xla") is None:
        raise MissingExtraError("torch_xla", extra="xla", needed_for=needed_for)


def has_devices() -> bool:
    """Return whether torch-xla has its devices in this process already."""
    extension = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    return extension is not None and bool(extension._xla_runtime_is_initialized())


def check_untouched(local_processes: int) -> None:
    """Refuse to share devices among processes of which this one has them already."""
    if has_devices():
        raise LaunchError(
            f"XLA was already used in this process, so its devices could not be shared among {local_processes} ranks:"
            " expected no call of torch_xla.device(), no tensor on an XLA device and no earlier job in it. Make the"
            " Trainer first and the tensors within its run, and start each job of a sweep as a program of its own."
        )


def find_device_type() -> str:
    """Return the type of the devices that torch-xla has here or would choose: ``CPU`` or ``TPU``."""
    return os.environ.get("PJRT_DEVICE", "TPU" if has_libtpu() and num_tpu_chips() else "CPU").upper()


def has_libtpu() -> bool:
    """Return whether torch-xla finds, or has found, the library without which it does not see a TPU."""
    found = getattr(sys.modules.get("torch_xla"), "_found_libtpu", None)
    if found is not None:
        return bool(found)
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


def num_tpu_chips() -> int:
    """Return how many chips of TPUs this host has, with torch-xla installed."""
    return int(importlib.import_module("torch_xla._internal.tpu").num_available_chips())


def check_accelerator(is_tpu: bool) -> None:
    """Refuse to train on the CPU where the Trainer was to train on TPUs."""
    if is_tpu and find_device_type() == "CPU":
        why = (
            "PJRT_DEVICE=CPU is set. Unset it"
            if has_libtpu()
            else "the package libtpu is missing. Install torch-xla with it: pip install 'torch-xla[tpu]==2.9.*', and"
            " unset PJRT_DEVICE if it is set"
        )
        raise ConfigurationError(
            f"accelerator='tpu', and torch-xla takes the CPU: expected a TPU, but {why}; or give the Trainer"
            " accelerator='cpu' to train on virtual devices of the CPU."
        )
