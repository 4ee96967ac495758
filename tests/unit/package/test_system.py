"""Cores and memory of this host, and the limits of control groups, version 1 and 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lightning_lockstep import _system

GIB = 2**30


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty tree of control groups, with this process in none."""
    monkeypatch.setattr(_system, "_CGROUPS", tmp_path)
    monkeypatch.setattr(_system, "_OWN_CGROUP", tmp_path / "own")
    _system.usable_cores.cache_clear()
    yield tmp_path
    _system.usable_cores.cache_clear()


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(("text", "limit"), [("max 100000", None), ("150000 100000", 1.5), ("400000 100000", 4.0)])
def test_a_cpu_limit_of_version_2_is_read(cgroups: Path, text: str, limit: float | None) -> None:
    write(cgroups, cpu__max=text)
    assert _system.cpu_limit() == limit


@pytest.mark.parametrize(("quota", "limit"), [("-1", None), ("250000", 2.5)])
def test_a_cpu_limit_of_version_1_is_read(cgroups: Path, quota: str, limit: float | None) -> None:
    write(cgroups / "cpu", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert _system.cpu_limit() == limit


def test_the_groups_of_this_process_and_those_above_it_bind(cgroups: Path) -> None:
    write(cgroups, own="0::/user.slice/job.scope\n")
    write(cgroups / "user.slice" / "job.scope", cpu__max="800000 100000", memory__max="max")
    write(cgroups / "user.slice", cpu__max="300000 100000", memory__max=str(GIB // 4))
    write(cgroups / "another.slice", cpu__max="100000 100000", memory__max="4096")
    assert _system.cpu_limit() == 3.0
    assert _system.memory_limit() == (GIB // 4, "memory of this control group")


def test_a_memory_limit_of_version_1_is_read(cgroups: Path) -> None:
    write(cgroups, own="4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n")
    write(cgroups / "memory" / "job", memory__limit_in_bytes=str(GIB // 2))
    write(cgroups / "memory", memory__limit_in_bytes="9223372036854771712")
    write(cgroups / "cpu" / "job", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert _system.memory_limit() == (GIB // 2, "memory of this control group")
    assert _system.cpu_limit() == 0.5


def test_without_a_limit_there_is_what_the_host_has(cgroups: Path) -> None:
    assert _system.cpu_limit() is None
    assert _system.memory_limit() == (psutil.virtual_memory().total, "memory of this host")


def test_a_cpu_limit_narrows_the_usable_cores(cgroups: Path) -> None:
    write(cgroups, cpu__max="50000 100000")
    assert len(_system.usable_cores()) == 1
    _system.usable_cores.cache_clear()
    write(cgroups, cpu__max="max 100000")
    assert _system.usable_cores() == tuple(sorted(os.sched_getaffinity(0)))
