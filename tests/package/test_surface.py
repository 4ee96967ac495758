"""The public surface: exactly these names, each of which can be used."""

from __future__ import annotations

import sys

import pytest

import lightning_lockstep
from tests.helpers import run_ranks

SURFACE = [
    # strategies
    "LockstepDDPStrategy",
    "LockstepMPIStrategy",
    # overflows
    "FP32Modules",
    "OverflowDetector",
    "detect_overflow",
    "run_in_fp32",
    # callbacks and functions
    "AutoBatchSize",
    "EffectiveBatchSize",
    "RankOrderedLogging",
    "StopTogether",
    "SyncedEarlyStopping",
    "check_breakpoint",
    "find_executable_batch_size",
    "get_logger",
    "in_rank_order",
    "set_breakpoint",
    # errors
    "BatchSizeError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveStallError",
    "ConfigurationError",
    "LaunchError",
    "MetricMissingError",
    "Preempted",
    "LockstepError",
    "MissingExtraError",
    "OverflowDetectedError",
    "RankFailedError",
]


def test_the_surface_is_this_list() -> None:
    assert sorted(lightning_lockstep.__all__) == sorted(SURFACE)


@pytest.mark.parametrize("name", SURFACE)
def test_each_name_resolves_to_something_of_that_name(name: str) -> None:
    value = getattr(lightning_lockstep, name)
    assert value.__name__ == name
    assert value.__module__.startswith("lightning_lockstep.")
    assert name in dir(lightning_lockstep)


def star_import() -> tuple[list[str], list[str]]:
    """In a process of its own: the names a star import brings, and the engines that came along."""
    namespace: dict[str, object] = {}
    exec("from lightning_lockstep import *", namespace)
    engines = [name for name in ("mpi4py", "deepspeed", "torch_xla", "hydra") if name in sys.modules]
    return sorted(name for name in namespace if not name.startswith("__")), engines


def test_star_import_brings_the_surface_and_no_engine() -> None:
    """Engines are imported where they are used, not where a class that could use them is defined."""
    assert run_ranks(1, star_import, backend=None) == [(sorted(SURFACE), [])]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LockstepDPPStrategy'"):
        _ = lightning_lockstep.LockstepDPPStrategy
