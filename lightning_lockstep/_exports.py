"""The table of public names, and how a package loads its own when they are first used.

What is named here is public; so is what a room's `__init__` names. Everything else is private.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

# public name -> the module that defines it
EXPORTS: dict[str, str] = {
    # strategies
    "LockstepDDPStrategy": "strategies.ddp",
    "LockstepDeepSpeedStrategy": "strategies.deepspeed",
    "LockstepMPIStrategy": "strategies.mpi",
    "LockstepXLAStrategy": "strategies.xla",
    "LockstepXLASPMDStrategy": "strategies.xla_spmd",
    # callbacks
    "AutoBatchSize": "callbacks.auto_batch_size",
    "ConsolidateCheckpoints": "callbacks.consolidate_checkpoints",
    "EffectiveBatchSize": "callbacks.effective_batch_size",
    "FP32Modules": "callbacks.fp32_modules",
    "OverflowDetector": "callbacks.overflow_detector",
    "RankOrderedLogging": "callbacks.rank_logging",
    "RecompileMonitor": "callbacks.recompile_monitor",
    "StaticShapes": "callbacks.static_shapes",
    "StopTogether": "callbacks.stop_together",
    "StragglerMonitor": "callbacks.straggler_monitor",
    "SyncedEarlyStopping": "callbacks.early_stopping",
    # in the place of Lightning's Tuner
    "LockstepTuner": "tuner",
    # functions
    "check_breakpoint": "stopping.breakpoint",
    "detect_overflow": "overflow.spots",
    "find_executable_batch_size": "batch_size.find_executable",
    "gather_uneven": "distributed.uneven.gather_uneven",
    "get_logger": "logs",
    "in_rank_order": "distributed.rank_order",
    "notebook_launcher": "notebook",
    "run_in_fp32": "numerics.float32",
    "set_breakpoint": "stopping.breakpoint",
    # errors
    "BatchSizeError": "errors",
    "CollectiveError": "errors",
    "CollectiveMismatchError": "errors",
    "CollectiveStallError": "errors",
    "ConfigurationError": "errors",
    "LaunchError": "errors",
    "LockstepError": "errors",
    "MetricMissingError": "errors",
    "MissingExtraError": "errors",
    "OverflowDetectedError": "errors",
    "Preempted": "errors",
    "RankFailedError": "errors",
}

# Old path -> public name, for configs and programs that name the old one. Goes after the next release.
MOVED: dict[str, str] = {
    "callbacks.breakpoint.StopTogether": "StopTogether",
    "callbacks.overflow.OverflowDetector": "OverflowDetector",
    "workloads.byte_gpt.ByteGPT": "demo.ByteGPT",
    "workloads.cnn.ConvNet": "demo.ConvNet",
    "workloads.digits.DigitsData": "demo.DigitsData",
    "workloads.source_text.SourceTextData": "demo.SourceTextData",
}


def exports_of(room: str) -> dict[str, str]:
    """Return the part of `EXPORTS` that the modules of one folder define."""
    return {name: module for name, module in EXPORTS.items() if module.startswith(f"{room}.")}


def lazy(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are loaded when first used."""

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"lightning_lockstep.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *names})


def public(name: str) -> Any:
    """Return what the package exports as ``name``, loaded now: for a room below the one that defines it."""
    return getattr(import_module(f"lightning_lockstep.{EXPORTS[name]}"), name)


def keep_old_paths(room: str) -> None:
    """Let the old modules of one folder be imported, each with the names that `MOVED` has for it."""
    for old in MOVED:
        if old.startswith(f"{room}."):
            path = f"lightning_lockstep.{old}".rpartition(".")[0]
            module = sys.modules.setdefault(path, ModuleType(path, "The old path of public names."))
            module.__getattr__ = partial(_load_moved, path)  # type: ignore[method-assign]


def _load_moved(path: str, name: str) -> Any:
    old = f"{path}.{name}"
    new = new_path(old)
    if new is None:
        raise AttributeError(f"module {path!r} has no attribute {name!r}")
    warnings.warn(renamed(old, new), DeprecationWarning, stacklevel=2)
    return getattr(import_module(new.rpartition(".")[0]), name)


def new_path(old: str) -> str | None:
    """Return the public path of what an old path names, or `None` if it is not an old one."""
    new = MOVED.get(old.removeprefix("lightning_lockstep."))
    return f"lightning_lockstep.{new}" if new else None


def renamed(old: str, new: str) -> str:
    """Return the sentence that says what to write instead of an old name."""
    return f"{old} is now {new}; the old name is removed after the next release."
