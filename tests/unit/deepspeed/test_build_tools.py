"""What a build of DeepSpeed's ops needs, and the locks that killed builds have left."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from lightning_lockstep._doors.deepspeed_internals import make_op_builder
from lightning_lockstep.deepspeed import build_tools
from lightning_lockstep.deepspeed.build_tools import find_build_locks, missing_tools, remove_stale_locks
from lightning_lockstep.deepspeed.builds import prepared_where_loaded
from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.errors import LaunchError

OP = "cpu_adam"


def lock_at(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_what_is_missing_is_said_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert missing_tools([OP]) == [
        "There is no C++ compiler: apt-get install g++",
        "There is no ninja: pip install ninja",
        f"Python's headers are missing (/nowhere/Python.h): apt-get install python{version}-dev",
    ]
    (tmp_path / "dnf").touch(mode=0o755)
    lock_at(tmp_path / "bin" / "ninja")
    compiler, ninja, _ = missing_tools([OP])
    assert compiler == "There is no C++ compiler: dnf install gcc-c++"
    assert ninja.endswith(f"not found: export PATH={tmp_path / 'bin'}:$PATH")
    monkeypatch.setenv("CXX", "/nowhere/g++-99 -m64")
    assert missing_tools([OP])[0].startswith("The C++ compiler '/nowhere/g++-99' that CXX names is not there")


def test_an_error_that_no_build_has_caused_stays_itself() -> None:
    """A module may take another optimizer if an op cannot be built; what fails then is something else."""
    import_deepspeed("cpu")

    def fail(names: list[str]) -> None:
        raise LaunchError("no compiler")

    with pytest.raises(KeyError, match="lr"), prepared_where_loaded(fail):
        with suppress(LaunchError):
            make_op_builder("CPUAdamBuilder").load()
        raise KeyError("lr")
    with pytest.raises(LaunchError, match="no compiler"), prepared_where_loaded(fail):
        try:
            make_op_builder("CPUAdamBuilder").load()
        except LaunchError as error:
            raise RuntimeError("requires the op") from error


@pytest.mark.parametrize("held", [True, False])
def test_with_locks_of_the_kernel_the_file_alone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    monkeypatch.setattr(build_tools, "locked_by_kernel", lambda: True)
    path = lock_at(tmp_path / OP / "lock")
    with path.open("rb+") as file:
        if held:
            fcntl.flock(file, fcntl.LOCK_EX)
        assert [(lock.op, lock.is_stale) for lock in find_build_locks(tmp_path)] == [(OP, False)] * held
        assert remove_stale_locks(True, tmp_path) == []
    assert path.exists() and find_build_locks(tmp_path) == []


@pytest.fixture
def lock_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks are those of torch before 2.15: they last as long as their files."""
    monkeypatch.setattr(build_tools, "locked_by_kernel", lambda: False)


@pytest.mark.usefixtures("lock_files")
def test_a_lock_that_nobody_holds_is_removed_with_consent(tmp_path: Path) -> None:
    paths = [lock_at(tmp_path / op / "lock") for op in (OP, "utils")]
    os.utime(paths[0], (time.time() - 600, time.time() - 600))
    lock = find_build_locks(tmp_path)[0]
    assert (lock.path, lock.op, lock.is_stale) == (paths[0], OP, True)
    assert "10 min ago, held by no process of this host" in str(lock)
    with pytest.raises(LaunchError) as caught:
        remove_stale_locks(False, tmp_path)
    assert f"rm {paths[0]} {paths[1]}" in str(caught.value)
    assert "remove_stale_locks=True" in str(caught.value)
    assert all(path.exists() for path in paths)
    assert [lock.op for lock in remove_stale_locks(True, tmp_path, ops=[OP])] == [OP]
    assert [path.exists() for path in paths] == [False, True]


@pytest.mark.usefixtures("lock_files")
def test_a_lock_that_a_process_holds_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / OP).mkdir()
    baton = FileBaton(str(tmp_path / OP / "lock"))
    assert baton.try_acquire()
    [lock] = find_build_locks(tmp_path)
    assert not lock.is_stale
    assert remove_stale_locks(True, tmp_path) == remove_stale_locks(False, tmp_path) == []
    assert lock.path.exists()
    baton.release()
    assert find_build_locks(tmp_path) == []
