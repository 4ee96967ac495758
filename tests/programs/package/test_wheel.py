"""What the built wheel holds, and that it is the wheel that these tests test."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lightning_lockstep
from tests.helpers import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def where_imported() -> str:
    import lightning_lockstep

    return lightning_lockstep.__file__


@pytest.mark.skipif(
    "LOCKSTEP_TESTS_WANT_WHEEL" not in os.environ, reason="only scripts/test installs the wheel"
)
def test_the_installed_wheel_is_tested_not_the_source_tree() -> None:
    here = Path(lightning_lockstep.__file__)
    assert here.is_relative_to(os.environ["LOCKSTEP_TESTS_WANT_WHEEL"])  # the environment that has it
    assert here.parent.parent.name == "site-packages"
    assert str(ROOT) not in sys.path
    assert "" not in sys.path
    # and in the ranks that tests start
    assert run_ranks(1, where_imported, backend=None) == [str(here)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    """Modules, py.typed and the config files alike: conf/*.yaml are data that a build may well forget."""
    package = ROOT / "lightning_lockstep"
    expected = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected
    assert "lightning_lockstep/py.typed" in held


def test_its_metadata(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "Requires-Python: <3.14,>=3.10" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    (lightning,) = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: lightning!")]
    assert "!=2.6.2" in lightning
    assert "!=2.6.3" in lightning
    for extra in ("mpi", "deepspeed", "xla", "plot", "tensorboard", "wandb", "mlflow", "demo", "all"):
        assert f"Provides-Extra: {extra}\n" in metadata
    scripts = wheel.read(f"{info}/entry_points.txt").decode()
    assert "lockstep-train = lightning_lockstep.train:main" in scripts
    assert "lockstep-doctor = " in scripts
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_its_version_is_the_package_s(wheel: zipfile.ZipFile) -> None:
    assert f"-{lightning_lockstep.__version__}-" in str(wheel.filename)
