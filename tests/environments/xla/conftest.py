"""Four virtual devices on the CPU, for every test of this folder."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest

HAS_XLA = importlib.util.find_spec("torch_xla") is not None


@pytest.fixture(scope="session", autouse=True)
def _four_devices() -> None:
    """Let torch-xla change the environment before a test looks at it: what it has chosen holds for the process."""
    if HAS_XLA:
        os.environ["PJRT_DEVICE"] = "CPU"
        os.environ["CPU_NUM_DEVICES"] = "4"
        runtime = importlib.import_module("torch_xla.runtime")
        runtime.use_spmd()
        # A backward on the CPU before torch-xla has its devices leaves autograd without a queue for them.
        runtime.global_runtime_device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_XLA:
        for item in items:
            if "/tests/environments/xla/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="torch_xla is not installed in this environment"))
