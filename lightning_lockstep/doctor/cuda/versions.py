"""Version numbers as tools print them."""

from __future__ import annotations

import re

__all__ = ["major", "release", "short"]

# A larger number is none of a version: int() would refuse the longest.
_MOST_DIGITS = 9


def release(version: str | None) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version, such as ``(2, 9, 0)`` of ``2.9.0+cu128``; empty if none."""
    match = re.match(r"\s*[vV]?(\d+(?:\.\d+)*)", version or "", re.ASCII)
    if match is None:
        return ()
    parts = match[1].split(".")
    return tuple(map(int, parts)) if max(map(len, parts)) <= _MOST_DIGITS else ()


def major(version: str | None) -> int:
    """Return the first number of a version, 0 if there is none."""
    return next(iter(release(version)), 0)


def short(version: str | None, parts: int = 2) -> str:
    """Return the first numbers of a version, such as ``2.9`` of ``2.9.0+cu128``; empty if there are none."""
    return ".".join(map(str, release(version)[:parts]))
