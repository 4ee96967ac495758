"""lightning-lockstep keeps every rank of a distributed PyTorch Lightning run in step.

Importing this package registers its strategies with Lightning and does nothing else; the public names
below are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from lightning_lockstep._registry import register_strategies as _register_strategies

# public name -> the module that defines it
_EXPORTS: dict[str, str] = {
    # strategies
    "LockstepDDPStrategy": "strategies.ddp",
    "LockstepMPIStrategy": "strategies.mpi",
    # callbacks
    "AutoBatchSize": "callbacks.auto_batch_size",
    "EffectiveBatchSize": "callbacks.effective_batch_size",
    "RankOrderedLogging": "callbacks.rank_logging",
    "StopTogether": "callbacks.stop_together",
    "SyncedEarlyStopping": "callbacks.early_stopping",
    # functions
    "check_breakpoint": "stopping.breakpoint",
    "find_executable_batch_size": "batch_size.find_executable",
    "get_logger": "logs",
    "in_rank_order": "logs",
    "set_breakpoint": "stopping.breakpoint",
    # overflows
    "FP32Modules": "callbacks.fp32_modules",
    "OverflowDetector": "callbacks.overflow_detector",
    "detect_overflow": "numerics.statistics",
    "run_in_fp32": "numerics.float32",
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

__version__ = "0.1.0"
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])


_register_strategies()
