"""The wheel is what these tests test, and it has each file of the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import lightning_lockstep
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def where_imported() -> str:
    import lightning_lockstep

    return lightning_lockstep.__file__


def files_of(package: Path) -> list[Path]:
    found = (path for path in package.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return sorted(path.relative_to(package) for path in found)


@pytest.mark.skipif("LOCKSTEP_TESTS_WANT_WHEEL" not in os.environ, reason="only scripts/test installs the wheel")
def test_the_installed_wheel_is_tested_not_the_source_tree() -> None:
    here = Path(lightning_lockstep.__file__)
    assert here.is_relative_to(os.environ["LOCKSTEP_TESTS_WANT_WHEEL"])  # the environment that has it
    assert here.parent.parent.name == "site-packages"
    assert str(ROOT) not in sys.path
    assert "" not in sys.path
    assert files_of(here.parent) == files_of(ROOT / "lightning_lockstep"), "also conf/*.yaml and py.typed"
    # and in the ranks that tests start
    assert run_ranks(1, where_imported, backend=None) == [str(here)]
