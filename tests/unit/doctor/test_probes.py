"""The probes, run for real: what they print is what the checks read."""

from __future__ import annotations

import os
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_lockstep._system import run_program
from lightning_lockstep.deepspeed.build_tools import locked_by_kernel
from lightning_lockstep.doctor.machine import Limits, Machine
from lightning_lockstep.doctor.registry import CheckOptions, Status
from tests.common.doctor.imitated_machine import run_check

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def test_two_processes_add_through_shared_memory() -> None:
    probed = Machine().probe("shared_memory")
    assert probed.error == "" and probed.facts["rounds"] > 100


@needs_compiler
def test_programs_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is there is found, one that is not is named; a lock that was left behind is too."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    os.utime(tmp_path / "cpu_adam" / "lock", (1, 1))
    probed = Machine().probe("build_tools", str(tmp_path))
    assert probed.error == ""
    links = probed.facts["links"]
    assert links["openmp"] == "" and "cudart" in links["cudart"]
    if locked_by_kernel():
        assert probed.facts["locks"] == []
        return
    (lock,) = probed.facts["locks"]
    assert lock["is_stale"] and lock["path"] == str(tmp_path / "cpu_adam" / "lock")


def test_a_probe_that_fails_says_why() -> None:
    probed = Machine().probe("absent")
    assert probed.facts == {} and probed.error == "KeyError: 'absent'"


@needs_deepspeed
@needs_compiler
def test_deepspeed_as_it_is_installed_here() -> None:
    result = run_check("deepspeed", Machine(), CheckOptions())
    found = {finding.subject: finding for finding in result.findings}
    assert found["import"].status is Status.OK and "DeepSpeed 0." in found["import"].evidence
    assert "cpu_adam" in found["operations buildable"].evidence
    assert any("DS_BUILD_CPU_ADAM=1" in line for line in found["ahead of time"].fix)


def test_this_machine() -> None:
    machine = Machine()
    assert machine.python.packages["torch"] and machine.python.executable == sys.executable
    assert isinstance(machine.limits, Limits) and machine.limits.cores >= 1
    assert machine.read_text("/absent/file") is None and not machine.exists("/absent")
    assert machine.run(["absent-program"]).is_missing
    assert machine.run([sys.executable, "-c", "print('\\xff' * 3)"]).succeeded
    assert machine.glob("/proc/self/stat*")


def test_nothing_of_a_program_is_left_when_its_time_is_over() -> None:
    script = "import subprocess, sys; subprocess.Popen(['sleep', '601']); print('up', flush=True); input()"
    began = time.monotonic()
    done = run_program(["sh", "-c", f'{sys.executable} -c "{script}"; sleep 600'], timeout=1.0)
    assert done.timed_out and time.monotonic() - began < 60
    while any(_command(process) == b"sleep\x00601\x00" for process in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() - began < 60, "what the program had started runs on"
        time.sleep(0.05)


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
