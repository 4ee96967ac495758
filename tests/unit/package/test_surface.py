"""The public surface: exactly these names, each of which can be used; `tests/programs` imports them afresh."""

from __future__ import annotations

import importlib

import pytest

import lightning_lockstep

STRATEGIES = [
    "LockstepDDPStrategy",
    "LockstepDeepSpeedStrategy",
    "LockstepFSDPStrategy",
    "LockstepMPIStrategy",
    "LockstepXLASPMDStrategy",
    "LockstepXLAStrategy",
]
CALLBACKS = [
    "AutoBatchSize",
    "ConsolidateCheckpoints",
    "EffectiveBatchSize",
    "FP32Modules",
    "OverflowDetector",
    "RankOrderedLogging",
    "ReplicaCheck",
    "StaticShapes",
    "StopTogether",
    "StragglerMonitor",
    "SyncedEarlyStopping",
]
SURFACE = [
    *STRATEGIES,
    *CALLBACKS,
    # functions
    "by_sample",
    "check_breakpoint",
    "detect_overflow",
    "find_executable_batch_size",
    "gather_uneven",
    "get_logger",
    "in_rank_order",
    "notebook_launcher",
    "run_in_fp32",
    "set_breakpoint",
    "shared",
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
    "ReplicaMismatchError",
]


def test_the_surface_is_this_list() -> None:
    assert sorted(lightning_lockstep.__all__) == sorted(SURFACE)
    assert set(SURFACE) <= set(dir(lightning_lockstep))
    values = {name: getattr(lightning_lockstep, name) for name in SURFACE}
    assert [name for name, value in values.items() if value.__name__ != name] == []
    assert all(value.__module__.startswith("lightning_lockstep.") for value in values.values())


@pytest.mark.parametrize(("room", "names"), [("callbacks", CALLBACKS), ("strategies", STRATEGIES)])
def test_a_room_has_exactly_its_names(room: str, names: list[str]) -> None:
    package = importlib.import_module(f"lightning_lockstep.{room}")
    assert sorted(package.__all__) == names and set(names) <= set(dir(package))
    assert [name for name in names if getattr(package, name) is not getattr(lightning_lockstep, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LockstepDPPStrategy'"):
        _ = lightning_lockstep.LockstepDPPStrategy
