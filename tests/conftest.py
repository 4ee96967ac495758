"""Fixtures that every test gets."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import psutil
import pytest

from tests.helpers.children import save_imports
from tests.helpers.device import DEVICE, chosen_device
from tests.helpers.leaks import LeakCheck
from tests.helpers.ranks import stop_server
from tests.helpers.selection import group_of, starts_programs, without_group

save_imports()

# A shell without job control starts what it puts into the background deaf to Ctrl-C, and so would be every
# process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def torch_sees_a_card() -> bool:
    import torch  # seconds, which a run on the CPU does without

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Have torch compile into a folder of this run.

    A rank that a test kills in the middle of a build leaves its lock, for which all later builds would wait.
    """
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out the slow tests: those that start programs, or wait"
    )
    parser.addoption(
        "--device", choices=("cpu", "cuda"), help="only the tests with a `device` fixture, on this device"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what starts programs; leave it out of the fast part, and begin with it otherwise.

    What waits for seconds without starting a program has the mark in its file.

    A worker that gets a long test at the very end keeps all others waiting. The longest is the group of MPI tests.
    """
    for item in items:
        if starts_programs(item):
            item.add_marker("slow")
        if group := group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
            if group == "mpi":
                item.add_marker("mpi")
    if config.getoption("device"):
        others = [item for item in items if "device" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    slow = [item for item in items if item.get_closest_marker("slow")]
    slow.sort(key=lambda item: item.get_closest_marker("mpi") is None)
    quick = [item for item in items if not item.get_closest_marker("slow")]
    if config.getoption("fast"):
        config.hook.pytest_deselected(items=slow)
        items[:] = quick
    else:
        items[:] = slow + quick


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report a test under the name by which ``--last-failed`` and the command line find it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker compares it with the name that has the group
        report.nodeid = without_group(report.nodeid)


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
