"""Imports of DeepSpeed that fail, each with what mends it, and an accelerator that is not that of the run.

One process tries all of them. No machine of ours has a broken CUDA, so the failing ones are those of a package in a
folder of the test, whose ``__init__`` raises what DeepSpeed raises there, by the same names and texts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError
from tests.harness import run_ranks

NO_TOOLKIT = """
class MissingCUDAException(Exception):
    pass
raise MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")
"""
OTHER_TORCH = "raise ImportError('/x/cpu_adam_op.so: undefined symbol: _ZN3c104cuda9SetDeviceEi')"
DOCTOR = "lockstep-doctor cuda deepspeed"
REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps deepspeed"

#: What the package does, what the error says, and what mends it.
BROKEN: dict[str, tuple[str, str, str]] = {
    "toolkit": (NO_TOOLKIT, "CUDA_HOME does not exist", DOCTOR),
    "other torch": (OTHER_TORCH, "undefined symbol", REINSTALL),
}
NEEDS_A_PACKAGE = "import hjson_of_nowhere.part"


def error_of(device_type: str | None) -> Exception:
    try:
        import_deepspeed(device_type)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@contextmanager
def imported_from(folder: Path, source: str) -> Iterator[None]:
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        yield
        assert "deepspeed" not in sys.modules and "DS_ACCELERATOR" not in os.environ
    finally:
        sys.path.remove(str(folder))


def all_imports(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # what Python has for one that is not installed
    found["not installed"] = error_of("cpu")
    del sys.modules["deepspeed"]
    sources = {name: source for name, (source, _, _) in BROKEN.items()}
    for name, source in {**sources, "needs a package": NEEDS_A_PACKAGE}.items():
        with imported_from(Path(folder, name), source):
            found[name] = error_of("cpu")
    os.environ["DS_ACCELERATOR"] = "cpu"
    found["another accelerator"] = error_of("cuda")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("packages"))
    return run_ranks(1, all_imports, folder, backend=None)[0]  # type: ignore[no-any-return]


def test_what_is_not_installed_is_named_with_its_command(found: dict[str, Any]) -> None:
    error = found["not installed"]
    assert isinstance(error, MissingExtraError)
    assert "needs the package 'deepspeed'" in str(error)
    assert "pip install '.[deepspeed]'" in str(error)
    assert isinstance(found["needs a package"], MissingExtraError)
    assert found["needs a package"].package == "hjson_of_nowhere"


@pytest.mark.parametrize("name", BROKEN)
def test_an_import_that_fails_is_one_line_with_what_mends_it(name: str, found: dict[str, Any]) -> None:
    _, cause, mend = BROKEN[name]
    assert isinstance(found[name], LaunchError)
    assert "\n" not in str(found[name]) and cause in str(found[name])
    assert f"Fix it with: {mend}" in str(found[name])


def test_an_accelerator_that_is_not_that_of_the_run(found: dict[str, Any]) -> None:
    error = found["another accelerator"]
    assert isinstance(error, ConfigurationError)
    assert "has the accelerator 'cpu', but the devices of this run are 'cuda'" in str(error)
    assert "Set DS_ACCELERATOR=cuda" in str(error)
