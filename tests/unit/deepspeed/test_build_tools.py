"""What a build of DeepSpeed's ops needs, and the locks of builds."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from lightning_lockstep.deepspeed import build_tools
from lightning_lockstep.deepspeed.build_tools import find_build_locks, missing_tools


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_what_is_missing_is_said_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert missing_tools() == [
        "There is no C++ compiler: apt-get install g++",
        "There is no ninja: pip install ninja",
        f"Python's headers are missing (/nowhere/Python.h): apt-get install python{version}-dev",
    ]
    (tmp_path / "dnf").touch(mode=0o755)
    made(tmp_path / "bin" / "ninja")
    compiler, ninja, _ = missing_tools()
    assert compiler == "There is no C++ compiler: dnf install gcc-c++"
    assert ninja.endswith(f"not found: export PATH={tmp_path / 'bin'}:$PATH")
    monkeypatch.setenv("CXX", "/nowhere/g++-99 -m64")
    assert missing_tools()[0].startswith("The C++ compiler '/nowhere/g++-99' that CXX names is not there")


@pytest.mark.parametrize(("torch", "expected"), [("2.14.1", [True, False]), ("2.15.0", [])])
def test_locks_of_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, expected: list[bool]
) -> None:
    monkeypatch.setattr(build_tools, "version", lambda package: torch)
    old = made(tmp_path / "py311_cpu" / "cpu_adam" / "lock")
    made(tmp_path / "utils" / "lock")
    os.utime(old, (time.time() - 1200, time.time() - 1200))
    found = find_build_locks(tmp_path)
    assert [lock["is_stale"] for lock in found] == expected
    if expected:
        assert found[0] == {"text": f"cpu_adam: {old} (made 20 min ago)", "path": str(old), "is_stale": True}
