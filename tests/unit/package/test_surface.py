"""The public surface: exactly these names, each of which can be used; `tests/programs` imports them afresh."""

from __future__ import annotations

import importlib
from types import ModuleType

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


# Names that people import from a room, as they do from Lightning.
ROOMS = {
    "callbacks": CALLBACKS,
    "strategies": STRATEGIES,
    "demo": ["ByteGPT", "ConvNet", "DigitsData", "SourceTextData"],
    "distributed": [
        "Communicator",
        "FailurePropagation",
        "FailureRecord",
        "Gather",
        "Gathered",
        "Message",
        "RankGroup",
        "SideChannel",
        "StepAgreement",
        "ZeroMQSideChannel",
        "at_shut_down",
        "current_communicator",
        "register_mpi_backend",
        "rendezvous_store",
        "shut_down",
    ],
    "launchers": ["detect_environment"],
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_exactly_its_names_and_its_files_stay_importable(room: str) -> None:
    package = importlib.import_module(f"lightning_lockstep.{room}")
    assert sorted(package.__all__) == ROOMS[room]
    assert set(ROOMS[room]) <= set(dir(package))
    for name in ROOMS[room]:
        value = getattr(package, name)
        assert value.__name__ == name
        if name in SURFACE:
            assert value is getattr(lightning_lockstep, name)
        # The files keep their own names: `from lightning_lockstep.callbacks import early_stopping` is one.
        file = value.__module__.rpartition(".")[2]
        assert isinstance(
            getattr(importlib.import_module(value.__module__.rpartition(".")[0]), file), ModuleType
        )
    with pytest.raises(
        AttributeError, match=f"module 'lightning_lockstep.{room}' has no attribute 'Nothing'"
    ):
        _ = package.Nothing


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LockstepDPPStrategy'"):
        _ = lightning_lockstep.LockstepDPPStrategy
