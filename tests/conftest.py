"""Fixtures that every test gets."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import costs
from tests.harness._server import load_module
from tests.harness.children import put_on_path
from tests.harness.device import DEVICE, chosen_device
from tests.harness.leaks import LeakCheck
from tests.harness.ranks import stop_server

put_on_path()
# Imported by its path, as `tests` is: with their folder on sys.path the source tree would be tested, not the wheel.
load_module("benchmarks", Path(__file__).parents[1] / "benchmarks" / "__init__.py", package=True)

# A shell without job control starts what it puts into the background deaf to Ctrl-C, and so would be every
# process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def torch_sees_a_card() -> bool:
    import torch  # seconds, which a run on the CPU does without

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Have torch compile into a folder of this run."""
    # A rank that a test kills in the middle of a build leaves its lock, for which all later builds would
    # wait.
    folder = os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="lockstep-test-builds-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if given := config.getoption("device"):
        if given == "cuda" and not torch_sees_a_card():
            raise pytest.UsageError("--device cuda: there is no CUDA device here")
        os.environ[DEVICE] = given
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as Lightning does where it uses a card


@pytest.fixture(scope="session")
def device() -> str:
    """The device that a test trains on, ``cpu`` or ``cuda``: who asks for this runs on both (``scripts/gpu``)."""
    return chosen_device()


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind; ``@pytest.mark.allow_leaks("threads", ...)`` excuses it."""
    before = LeakCheck.now()
    yield
    allowed = [kind for marker in request.node.iter_markers("allow_leaks") for kind in marker.args]
    leaks = before.leaks(allowed)
    before.restore()
    if leaks:
        pytest.fail("the test left something behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def empty_folder(leak_police: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a folder of its own: not the repository, where the demo may have left runs in `outputs/`."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), help="only the tests with a `device` fixture, on this device")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the costly tests: a worker that gets a long one at the very end keeps all others waiting."""
    for item in items:
        if group := costs.group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
    if config.getoption("device"):
        others = [item for item in items if "device" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    order = [*reversed(costs.FOLDERS), ""]
    items.sort(key=lambda item: (costs.group_of(item) != "mpi", order.index(costs.folder_of(item.path))))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let the harness know which test starts what; a fixture that it is the first to ask for is part of it."""
    costs.begin(item)
    try:
        return (yield)
    finally:
        costs.begin(None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report a test under the name by which ``--last-failed`` and the command line find it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker compares it with the name that has the group
        report.nodeid = costs.without_group(report.nodeid)
        if report.failed and DEVICE in os.environ:  # a stage of scripts/gpu may be cut off before the end
            print(f"\n{report.longreprtext[-4000:]}")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto``: one worker more than there are cores, since tests also wait; 2 GB of memory for each."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    if all(".py" in argument for argument in config.args):
        return 0  # a file or a test: not worth the start of workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores + 1, 16, psutil.virtual_memory().available // 2**31))


def pytest_sessionfinish() -> None:
    """End the process that ranks are forked from."""
    stop_server()
