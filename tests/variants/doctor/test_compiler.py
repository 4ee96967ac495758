"""The check of DeepSpeed's builds where a compiler is installed."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from lightning_lockstep.doctor.machine import Machine, release
from lightning_lockstep.doctor.registry import CheckOptions, Status
from tests.models.doctor.imitated_machine import run_check

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler: apt install g++")


def test_deepspeed_as_it_is_installed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (1, 1))
    result = run_check("deepspeed", Machine(), CheckOptions())
    found = {finding.subject: finding for finding in result.findings}
    assert found["import"].status is Status.OK and "DeepSpeed 0." in found["import"].evidence
    assert "cpu_adam" in found["operations buildable"].evidence and "build tools" not in found
    assert any("DS_BUILD_CPU_ADAM=1" in line for line in found["ahead of time"].fix)
    if release(version("torch")) < (2, 15):  # later ones release the lock of a killed build
        assert found["build locks"].fix == (f"rm {lock}",)
