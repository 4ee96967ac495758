"""The public surface: exactly these names, each of which can be used."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lightning_lockstep
from tests.helpers import COMMON, run_ranks

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
    "RecompileMonitor",
    "ReplicaCheck",
    "StaticShapes",
    "StopTogether",
    "StragglerMonitor",
    "SyncedEarlyStopping",
]
SURFACE = [
    *STRATEGIES,
    *CALLBACKS,
    "LockstepTuner",
    # functions
    "check_breakpoint",
    "detect_overflow",
    "find_executable_batch_size",
    "gather_uneven",
    "get_logger",
    "in_rank_order",
    "notebook_launcher",
    "run_in_fp32",
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
    "ReplicaMismatchError",
]


def test_the_surface_is_this_list() -> None:
    assert sorted(lightning_lockstep.__all__) == sorted(SURFACE)


@pytest.mark.parametrize("name", SURFACE)
def test_each_name_resolves_to_something_of_that_name(name: str) -> None:
    value = getattr(lightning_lockstep, name)
    assert value.__name__ == name
    assert value.__module__.startswith("lightning_lockstep.")
    assert name in dir(lightning_lockstep)


# Names that people import from a room, as they do from Lightning.
ROOMS = {
    "callbacks": CALLBACKS,
    "strategies": sorted([*STRATEGIES, "LifecycleSettings", "RankLifecycle"]),
    "demo": ["ByteGPT", "ConvNet", "DigitsData", "GlobalBatchSampler", "SourceTextData"],
    "distributed": [
        "Agreement",
        "Communicator",
        "FailurePropagation",
        "FailureRecord",
        "Gather",
        "Gathered",
        "LocalSideChannel",
        "MPIBackendOptions",
        "Message",
        "PendingReduction",
        "RankGroup",
        "SideChannel",
        "SingleProcessCommunicator",
        "StepAgreement",
        "TorchCommunicator",
        "ZeroMQSideChannel",
        "alone",
        "at_shut_down",
        "current_communicator",
        "register_mpi_backend",
        "rendezvous_store",
        "shut_down",
        "use_communicator",
    ],
    "launchers": ["detect_environment"],
}

# Modules that users run with `python -m`.
COMMANDS = {"lightning_lockstep.deepspeed.memory_estimate"}
PAGES = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").rglob("*.py"))


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


# Every public name, used; `reveal_type` shows what a checker takes it for.
PROGRAM = """
import lightning_lockstep
from lightning_lockstep import {surface}
from lightning_lockstep.callbacks import {callbacks}
from lightning_lockstep.demo import {demo}
from lightning_lockstep.distributed import {distributed}
from lightning_lockstep.launchers import {launchers}
from lightning_lockstep.strategies import {strategies}

version: str = lightning_lockstep.__version__
{revealed}
lightning_lockstep.NoSuchName
"""


def test_a_strict_type_checker_knows_every_public_name(tmp_path: Path) -> None:
    """The stub is what mypy and editors read, and what the program loads names by: one list for both."""
    names = {room: ", ".join(found) for room, found in ROOMS.items()}
    revealed = "\n".join(f"reveal_type(lightning_lockstep.{name})" for name in SURFACE)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(surface=", ".join(SURFACE), revealed=revealed, **names))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}", str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    said = done.stdout.splitlines()
    (error, _) = (line for line in said if "note: Revealed type" not in line)
    assert 'Module has no attribute "NoSuchName"' in error, done.stdout
    assert len(said) == len(SURFACE) + 2
    assert [line for line in said if 'is "Any"' in line] == []


def test_the_program_that_the_checkers_get_uses_every_public_name() -> None:
    """`scripts/check` gives it to mypy and pyright."""
    used = {name for _, name in own_imports(COMMON / "package" / "typed_program.py")}
    assert set(SURFACE) <= used


def star_import(package: str) -> tuple[list[str], list[str]]:
    """In a process of its own: the names a star import brings, and the engines that came along."""
    namespace: dict[str, object] = {}
    exec(f"from {package} import *", namespace)
    engines = [name for name in ("mpi4py", "deepspeed", "torch_xla", "hydra") if name in sys.modules]
    return sorted(name for name in namespace if not name.startswith("__")), engines


def test_star_import_brings_the_surface_and_no_engine() -> None:
    """Engines are imported where they are used, not where a class that could use them is defined."""
    assert run_ranks(1, star_import, "lightning_lockstep", backend=None) == [(sorted(SURFACE), [])]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_names_nothing_private(path: Path) -> None:
    """What a page for users names by its whole path is there, and is named by the package or by its room."""
    for dotted in sorted(set(re.findall(r"\blightning_lockstep\.\w+\.[\w.]*\w", path.read_text()))):
        package, _, name = dotted.rpartition(".")
        if dotted not in COMMANDS and name != "X":
            assert name in importlib.import_module(package).__all__, dotted


def own_imports(path: Path) -> list[tuple[str, str]]:
    """Module and name of each import of this package in a file; an ``import`` statement names no name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] == "lightning_lockstep"]


def private_imports(path: Path) -> list[str]:
    """What a file imports of this package beside what its public modules name."""
    public = {
        "lightning_lockstep",
        "lightning_lockstep.train",
        *(f"lightning_lockstep.{room}" for room in ROOMS),
    }
    return [
        f"{module} {name}"
        for module, name in own_imports(path)
        if module not in public or (name and name not in importlib.import_module(module).__all__)
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_nothing_private(path: Path) -> None:
    """People begin with a copy of one."""
    assert private_imports(path) == []


def test_a_private_import_is_found(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    for line in (
        "from lightning_lockstep.logs.sender import sender_on",
        "from lightning_lockstep.logs import logger",
        "from lightning_lockstep import logs",
        "from lightning_lockstep._doors.lightning import Trainer",
        "import lightning_lockstep._system",
    ):
        path.write_text(line)
        assert len(private_imports(path)) == 1, line


@pytest.mark.parametrize("room", ["callbacks", "strategies"])
def test_so_does_a_star_import_from_a_room(room: str) -> None:
    assert run_ranks(1, star_import, f"lightning_lockstep.{room}", backend=None) == [(ROOMS[room], [])]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LockstepDPPStrategy'"):
        _ = lightning_lockstep.LockstepDPPStrategy
