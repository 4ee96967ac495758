"""DeepSpeed imported: its accelerator, what the import leaves behind, and the errors of one that fails.

One process tries all imports. No machine of ours has a broken CUDA, so the failing ones are those of a package in a
folder of the test, whose ``__init__`` raises what DeepSpeed raises there, by the same names and texts.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.errors import ConfigurationError, LaunchError, MissingExtraError
from tests.harness import run_ranks_raw

NO_TOOLKIT = """
class MissingCUDAException(Exception):
    pass
raise MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")
"""
NO_LIBRARY = "raise ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')"
OTHER_TORCH = "raise ImportError('/x/cpu_adam_op.so: undefined symbol: _ZN3c104cuda9SetDeviceEi')"
DOCTOR = "lockstep-doctor cuda deepspeed"
REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps deepspeed"

#: What the package does, what the error says, and what mends it.
BROKEN: dict[str, tuple[str, str, str]] = {
    "toolkit": (NO_TOOLKIT, "CUDA_HOME does not exist", DOCTOR),
    "library": (NO_LIBRARY, "libcudart.so.12", REINSTALL),
    "other torch": (OTHER_TORCH, "undefined symbol", REINSTALL),
    "unknown": ("raise RuntimeError('the moon')", "the moon", DOCTOR),
    "a part": ("import deepspeed.ops", "No module named 'deepspeed.ops'", REINSTALL),
}
NEEDS_A_PACKAGE = "import hjson_of_nowhere.part"
#: DS_ACCELERATOR and the devices of the run, which DeepSpeed or the run does not take.
CHOICES: list[tuple[str | None, str | None]] = [
    ("cpu", "cuda"),
    ("toaster", None),
    (None, "xla"),
]


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
    found |= import_and_look()
    forget_import()
    for variable, device_type in CHOICES:
        if variable is not None:
            os.environ["DS_ACCELERATOR"] = variable
        found[f"{variable}, {device_type}"] = error_of(device_type)
        os.environ.pop("DS_ACCELERATOR", None)
        forget_import()
    return found


def forget_import() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def import_and_look() -> dict[str, Any]:
    logging.getLogger().setLevel(logging.ERROR)
    before = (warnings.filters[:], logging.getLogger().handlers[:], os.environ.get("DS_ACCELERATOR"))
    deepspeed = import_deepspeed("cpu" if torch.accelerator.is_available() else None)
    added = [str(filter) for filter in warnings.filters if filter not in before[0]]
    after = (
        warnings.filters[len(added) :],
        logging.getLogger().handlers[:],
        os.environ.get("DS_ACCELERATOR"),
    )
    logger = logging.getLogger("DeepSpeed")
    return {
        "accelerator": deepspeed.get_accelerator().device_name(),
        "unchanged": before == after,
        "hidden": sum("all_gather_into" in text or "reduce_scatter_tensor" in text for text in added),
        "added": len(added),
        "root": logging.getLogger().level,
        "levels": {logger.level, *(handler.level for handler in logger.handlers)},
        "again": import_deepspeed("cpu") is deepspeed,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("packages"))
    [outcome] = run_ranks_raw(1, all_imports, folder, backend=None)
    assert outcome.ok, outcome.traceback
    return {**outcome.value, "said": outcome.stdout + outcome.stderr}


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


@pytest.mark.parametrize(("variable", "device_type"), CHOICES)
def test_an_accelerator_that_cannot_be(
    variable: str | None, device_type: str | None, found: dict[str, Any]
) -> None:
    error = found[f"{variable}, {device_type}"]
    assert isinstance(error, ConfigurationError)
    if variable is not None and device_type is not None:
        assert f"has the accelerator {variable!r}, but the devices of this run are {device_type!r}" in str(
            error
        )
        assert f"Set DS_ACCELERATOR={device_type}" in str(error)
    else:
        assert f'Value "{variable or device_type}" is not supported' in str(error)


def test_the_import_leaves_no_trace_and_says_nothing(found: dict[str, Any]) -> None:
    assert found["said"] == ""
    expected = {
        "accelerator": "cpu",
        "unchanged": True,
        "hidden": 2,
        "added": 2,
        "root": logging.ERROR,
        "levels": {logging.WARNING},
        "again": True,
    }
    assert {name: found[name] for name in expected} == expected
