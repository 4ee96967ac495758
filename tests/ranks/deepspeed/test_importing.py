"""DeepSpeed imported: its accelerator, what the import leaves behind, and the errors of one that fails.

Each import happens in a process of its own. No machine of ours has a broken CUDA, so the failing imports are those of a
package in a folder of the test, whose ``__init__`` raises what DeepSpeed raises there, by the same names and texts.
"""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.errors import ConfigurationError, LaunchError, LockstepError, MissingExtraError
from tests.helpers import run_ranks, run_ranks_raw

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
needs_cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")


def error_of(device_type: str | None) -> Exception:
    try:
        import_deepspeed(device_type)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def fail_without() -> Exception:
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # what Python has for one that is not installed
    return error_of("cpu")


def test_not_installed() -> None:
    [error] = run_ranks(1, fail_without, backend=None)
    assert isinstance(error, MissingExtraError)
    assert "needs the package 'deepspeed'" in str(error)
    assert "pip install 'lightning-lockstep[deepspeed]'" in str(error)


def fail_with(folder: str, cuda: str | None) -> tuple[Exception, dict[str, Any]]:
    torch.version.cuda = cuda  # type: ignore[assignment]
    sys.path.insert(0, folder)
    return error_of("cpu"), {
        "environment": os.environ.get("DS_ACCELERATOR"),
        "imported": "deepspeed" in sys.modules,
    }


NO_TOOLKIT = """
class MissingCUDAException(Exception):
    pass
raise MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")
"""
OTHER_TOOLKIT = """
class CUDAMismatchException(Exception):
    pass
raise CUDAMismatchException(
    ">- DeepSpeed Op Builder: Installed CUDA version 11.8 does not match the version torch was compiled with 12.8,"
    " unable to compile cuda/cpp extensions without a matching cuda version.")
"""
NO_NVCC = "raise FileNotFoundError(2, 'No such file or directory', '/usr/local/cuda/bin/nvcc')"
NO_LIBRARY = "raise ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')"
OTHER_TORCH = "raise ImportError('/x/cpu_adam_op.so: undefined symbol: _ZN3c104cuda9SetDeviceEi')"
NO_NINJA = "raise RuntimeError('Ninja is required to load C++ extensions (pip install ninja to get it)')"
INSTALL_TOOLKIT = "apt-get install cuda-toolkit-12-8 && export CUDA_HOME=/usr/local/cuda-12.8"
REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps deepspeed"


@pytest.mark.parametrize(
    ("source", "cuda", "cause", "mend"),
    [
        (NO_TOOLKIT, "12.8", "CUDA_HOME does not exist", INSTALL_TOOLKIT),
        (NO_TOOLKIT, None, "CUDA_HOME does not exist", "export DS_ACCELERATOR=cpu"),
        (OTHER_TOOLKIT, "12.8", "Installed CUDA version 11.8", INSTALL_TOOLKIT),
        (NO_NVCC, "12.8", "/usr/local/cuda/bin/nvcc", INSTALL_TOOLKIT),
        (NO_LIBRARY, "12.8", "libcudart.so.12", REINSTALL),
        (OTHER_TORCH, "12.8", "undefined symbol", REINSTALL),
        (NO_NINJA, None, "Ninja is required", "pip install --force-reinstall ninja"),
        ("import deepspeed.ops", None, "No module named 'deepspeed.ops'", REINSTALL),
    ],
    ids=["toolkit", "toolkit-cpu", "other-toolkit", "nvcc", "library", "other-torch", "ninja", "broken"],
)
def test_an_import_that_fails_is_one_line_with_what_mends_it(
    tmp_path: Path, source: str, cuda: str | None, cause: str, mend: str
) -> None:
    write_package(tmp_path, source)
    [(error, after)] = run_ranks(1, fail_with, str(tmp_path), cuda, backend=None)
    assert isinstance(error, LaunchError)
    assert "\n" not in str(error)
    assert cause in str(error)
    assert f"Fix it with: {mend}" in str(error)
    assert after == {"environment": None, "imported": False}


def test_a_package_that_it_needs_is_missing(tmp_path: Path) -> None:
    write_package(tmp_path, "import hjson_of_nowhere.part")
    [(error, _)] = run_ranks(1, fail_with, str(tmp_path), None, backend=None)
    assert isinstance(error, MissingExtraError)
    assert error.package == "hjson_of_nowhere"


def test_what_is_not_known_is_raised_as_it_is(tmp_path: Path) -> None:
    write_package(tmp_path, "raise RuntimeError('the moon is in the wrong house')")
    [(error, _)] = run_ranks(1, fail_with, str(tmp_path), None, backend=None)
    assert type(error) is RuntimeError
    assert not isinstance(error, LockstepError)


def write_package(folder: Path, source: str) -> None:
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text(textwrap.dedent(source))


def import_and_look() -> dict[str, Any]:
    logging.getLogger().setLevel(logging.ERROR)
    before = (warnings.filters[:], logging.getLogger().handlers[:], os.environ.get("DS_ACCELERATOR"))
    deepspeed = import_deepspeed("cpu")
    added = [str(filter) for filter in warnings.filters if filter not in before[0]]
    after = (
        warnings.filters[len(added) :],
        logging.getLogger().handlers[:],
        os.environ.get("DS_ACCELERATOR"),
    )
    logger = logging.getLogger("DeepSpeed")
    return {
        "name": deepspeed.__name__,
        "accelerator": deepspeed.get_accelerator().device_name(),
        "unchanged": before == after,
        "hidden": sum("all_gather_into" in text or "reduce_scatter_tensor" in text for text in added),
        "added": len(added),
        "root": logging.getLogger().level,
        "levels": {logger.level, *(handler.level for handler in logger.handlers)},
        "handlers": len(logger.handlers),
        "filters": len(logger.filters),
        "again": import_deepspeed("cpu") is deepspeed,
    }


@needs_deepspeed
def test_the_import_leaves_no_trace_and_says_nothing() -> None:
    [outcome] = run_ranks_raw(1, import_and_look, backend=None)
    assert outcome.ok, outcome.traceback
    assert outcome.value == {
        "name": "deepspeed",
        "accelerator": "cpu",
        "unchanged": True,
        "hidden": 2,
        "added": 2,
        "root": logging.ERROR,
        "levels": {logging.WARNING},
        "handlers": 1,
        "filters": 0,
        "again": True,
    }
    assert (outcome.stdout, outcome.stderr) == ("", "")


def import_bare() -> bool:
    before = warnings.filters[:]
    import deepspeed  # noqa: F401

    return warnings.filters[:] == before


@needs_deepspeed
def test_it_would_leave_some_by_itself() -> None:
    """What the test above compares with: the reasons for what is done."""
    [outcome] = run_ranks_raw(1, import_bare, backend=None)
    assert "Setting accelerator to CPU" in outcome.stdout or torch.accelerator.is_available()


def choose(device_type: str | None) -> str:
    return str(import_deepspeed(device_type).get_accelerator().device_name())


@needs_deepspeed
@needs_cpu_only
def test_without_a_device_it_has_the_cpu() -> None:
    assert run_ranks(1, choose, None, backend=None) == ["cpu"]


@needs_deepspeed
def test_the_users_choice_stands() -> None:
    assert run_ranks(1, choose, None, backend=None, env={"DS_ACCELERATOR": "cuda"}) == ["cuda"]


def import_twice() -> tuple[str, str]:
    # As a library would that imports it first, on a machine with GPUs.
    os.environ["DS_ACCELERATOR"] = "cuda"
    import deepspeed

    del os.environ["DS_ACCELERATOR"]
    before = deepspeed.get_accelerator().device_name()
    return before, import_deepspeed("cpu").get_accelerator().device_name()


@needs_deepspeed
def test_an_earlier_import_gets_the_accelerator_of_the_run() -> None:
    [outcome] = run_ranks_raw(1, import_twice, backend=None)
    assert outcome.value == ("cuda", "cpu")
    assert "imported before with the accelerator 'cuda' and now has 'cpu'" in outcome.stderr


@pytest.mark.parametrize(("variable", "device_type"), [("cuda", "cpu"), ("cpu", "cuda"), ("supa", "cpu")])
def test_a_variable_that_contradicts_the_run(variable: str, device_type: str) -> None:
    [error] = run_ranks(1, error_of, device_type, backend=None, env={"DS_ACCELERATOR": variable})
    assert isinstance(error, ConfigurationError)
    assert f"DS_ACCELERATOR is {variable!r}" in str(error)
    assert f"the devices of this run are {device_type!r}" in str(error)


@needs_deepspeed
@pytest.mark.parametrize(("variable", "device_type"), [("toaster", None), (None, "xla")])
def test_a_device_that_deepspeed_does_not_know(variable: str | None, device_type: str | None) -> None:
    env = {} if variable is None else {"DS_ACCELERATOR": variable}
    [error] = run_ranks(1, error_of, device_type, backend=None, env=env)
    assert isinstance(error, ConfigurationError)
    assert f'Value "{variable or device_type}" is not supported' in str(error)


@needs_cpu_only
def test_cuda_without_a_device() -> None:
    [error] = run_ranks(1, error_of, "cuda", backend=None)
    assert isinstance(error, ConfigurationError)
    assert "device_type='cuda': expected 'cpu'" in str(error)
