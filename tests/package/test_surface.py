"""The public surface: exactly these names, each of which can be used."""

from __future__ import annotations

import sys

import pytest

import lightning_lockstep
from tests.helpers import run_ranks

SURFACE = [
    # strategies
    "LockstepDDPStrategy",
    # errors
    "BatchSizeError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveStallError",
    "ConfigurationError",
    "LaunchError",
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


def test_star_import_brings_the_surface() -> None:
    code = "from lightning_lockstep import *; print(*sorted(n for n in dir() if not n.startswith('__')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == sorted(SURFACE)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LockstepDPPStrategy'"):
        _ = lightning_lockstep.LockstepDPPStrategy
