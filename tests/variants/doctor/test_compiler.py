"""The doctor's probes where a compiler is installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lightning_lockstep.deepspeed.build_tools import locked_by_kernel
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import CheckOptions, Status
from tests.common.doctor.imitated_machine import run_check

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="there is no C++ compiler: apt install g++"
)


def test_a_lock_that_was_left_behind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    os.utime(tmp_path / "cpu_adam" / "lock", (1, 1))
    probed = Machine().probe("build_tools")
    assert probed.error == ""
    assert probed.facts["missing"] == []
    if locked_by_kernel():
        assert probed.facts["locks"] == []
        return
    (lock,) = probed.facts["locks"]
    assert lock["is_stale"] and lock["path"] == str(tmp_path / "cpu_adam" / "lock")


def test_deepspeed_as_it_is_installed_here() -> None:
    result = run_check("deepspeed", Machine(), CheckOptions())
    found = {finding.subject: finding for finding in result.findings}
    assert found["import"].status is Status.OK and "DeepSpeed 0." in found["import"].evidence
    assert "cpu_adam" in found["operations buildable"].evidence
    assert any("DS_BUILD_CPU_ADAM=1" in line for line in found["ahead of time"].fix)
