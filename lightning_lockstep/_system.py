"""What this process may use of its host: cores, CPU time and memory, with the limits of its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

__all__ = ["cpu_limit", "kills_for_memory", "memory_left", "memory_limit", "usable_cores"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")


@cache  # pinning narrows the affinity of this process; later calls must still see what it began with
def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores this process may use, fewer where a control group limits its CPU time."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
    limit = cpu_limit()
    return tuple(cores if limit is None else cores[: max(1, int(limit))])


def cpu_limit() -> float | None:
    """Return the CPU time limit of this process's control group [cores], or ``None`` where there is none."""
    limits = []
    for folder in _cgroup_folders("cpu"):
        with suppress(OSError, ValueError):  # absent, or "max" for no limit
            quota, period = (folder / "cpu.max").read_text().split()
            limits.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                limits.append(quota_us / int((folder / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def memory_limit() -> tuple[int, str]:
    """Return the most memory that the processes here can have [bytes], and what sets that limit."""
    limits = [(int(psutil.virtual_memory().total), "memory of this host")]
    for folder in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append((int((folder / name).read_text()), "memory of this control group"))
    return min(limits)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that bind this process, version 1 and 2, its own one first.

    A container usually sees its own group at the root of the mount, whatever path the kernel reports.
    """
    groups = []
    with suppress(OSError):
        groups = _OWN_CGROUP.read_text().splitlines()
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder
            folder = folder.parent
    yield _CGROUPS
    yield _CGROUPS / controller


def kills_for_memory() -> int | None:
    """Return how many processes of this process's control group the kernel has killed because memory ran out.

    ``None`` where the kernel does not say. Of the whole host where the group does not count its own.
    """
    for folder in _cgroup_folders("memory"):
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, ValueError, KeyError):
                return _counter(folder / name)
    with suppress(OSError, ValueError, KeyError):
        return _counter(_VMSTAT)
    return None


def memory_left() -> int:
    """Return how much more memory the processes here can have [bytes], within the limits of the control groups."""
    left = [int(psutil.virtual_memory().available)]
    for folder in _cgroup_folders("memory"):
        for used, limit in (
            ("memory.current", "memory.max"),
            ("memory.usage_in_bytes", "memory.limit_in_bytes"),
        ):
            with suppress(OSError, ValueError):
                free = int((folder / limit).read_text()) - int((folder / used).read_text())
                left.append(max(0, free) + _reclaimable(folder))
    return min(left)


def _reclaimable(folder: Path) -> int:
    """Return what a control group counts as used and can give back: pages of files that nobody has used lately."""
    with suppress(OSError, ValueError, KeyError):
        return _counter(folder / "memory.stat", "inactive_file")
    return 0


def _counter(file: Path, name: str = "oom_kill") -> int:
    """Return the value of one line of a file whose lines are a name and a whole number."""
    lines = (line.split() for line in file.read_text().splitlines())
    return int({line[0]: line[1] for line in lines if len(line) == 2}[name])
