"""Importing the package, and its rooms that people import from, registers the strategies and does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import lightning_lockstep
from lightning_lockstep import callbacks, strategies

# Engines and tools that only somebody who asks for them should pay for. Lightning itself imports some of
# them (torchmetrics: matplotlib, transformers), so what counts is what our import adds to Lightning's.
NOT_OURS = [
    "accelerate",
    "deepspeed",
    "hydra",
    "matplotlib",
    "mpi4py",
    "omegaconf",
    "sklearn",
    "torch_xla",
    "transformers",
]

PROBE = """
import json, logging, os, sys, threading, warnings
import lightning.pytorch, torch
from lightning.pytorch.strategies import StrategyRegistry

def state():
    loggers = {None: logging.getLogger(), **logging.Logger.manager.loggerDict}
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "os_threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1,
        "loggers": {
            str(name): [logger.level, logger.propagate, [repr(handler) for handler in logger.handlers]]
            for name, logger in loggers.items()
            if isinstance(logger, logging.Logger) and not str(name).startswith("lightning_lockstep")
        },
        "warning_filters": [repr(entry) for entry in warnings.filters],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook)],
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),
        "group": torch.distributed.is_initialized(),
        "random": torch.initial_seed(),
        "path": list(sys.path),
        "cwd": sorted(os.listdir(".")),
    }

before, modules, strategies = state(), set(sys.modules), set(StrategyRegistry)
import lightning_lockstep, lightning_lockstep.callbacks, lightning_lockstep.strategies
own = [logging.getLogger(n) for n in logging.Logger.manager.loggerDict if n.startswith("lightning_lockstep")]
after = state()
modules_after, strategies_after, stars = set(sys.modules), set(StrategyRegistry), {}
for package in ("", ".callbacks", ".strategies"):
    names = {}
    exec(f"from lightning_lockstep{package} import *", names)
    stars[package] = sorted(name for name in names if not name.startswith("__"))
print(json.dumps({
    "stars": stars, "modules_of_stars": sorted(set(sys.modules) - modules),
    "before": before, "after": after,
    "modules": sorted(modules_after - modules),
    "strategies": sorted(strategies_after - strategies),
    "lost": sorted(strategies - set(StrategyRegistry)),
    "own_handlers": [repr(h) for logger in own for h in logger.handlers],
    "own_levels": [logger.level for logger in own],
}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:lightning_lockstep", "-c", PROBE],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path_factory.mktemp("cwd"),
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    result["output"] = done.stdout.splitlines()[:-1]
    return result


def test_it_prints_nothing(imported: Any) -> None:
    assert imported["output"] == []


@pytest.mark.parametrize(
    "what",
    [
        "environment",
        "threads",
        "os_threads",
        "loggers",
        "warning_filters",
        "hooks",
        "torch_threads",
        "cuda",
        "group",
        "random",
        "path",
        "cwd",
    ],
)
def test_it_leaves_the_process_as_it_was(imported: Any, what: str) -> None:
    assert imported["after"][what] == imported["before"][what]


def test_its_own_loggers_are_not_set_up(imported: Any) -> None:
    assert imported["own_handlers"] == []
    assert set(imported["own_levels"]) <= {0}


@pytest.mark.parametrize("which", ["modules", "modules_of_stars"])
def test_it_imports_no_engine_nor_does_a_star_import(imported: Any, which: str) -> None:
    """Engines are imported where they are used, not where a class that could use them is defined."""
    roots = {name.partition(".")[0] for name in imported[which]}
    assert roots & set(NOT_OURS) == set()


def test_a_star_import_brings_the_public_names(imported: Any) -> None:
    rooms = {"": lightning_lockstep, ".callbacks": callbacks, ".strategies": strategies}
    assert imported["stars"] == {name: sorted(room.__all__) for name, room in rooms.items()}


def test_it_imports_few_modules_of_its_own(imported: Any) -> None:
    """The public names are loaded when first used: the rooms stay untouched until then."""
    own = {name.split(".", 1)[1] for name in imported["modules"] if name.startswith("lightning_lockstep.")}
    assert own == {
        *("_lightning", "_registry", "_text"),
        *("callbacks", "errors", "strategies"),
    }


def test_it_registers_its_strategies_and_takes_none_away(imported: Any) -> None:
    assert imported["lost"] == []
    assert "lockstep_ddp" in imported["strategies"]
    assert all(name.startswith("lockstep_") for name in imported["strategies"])
