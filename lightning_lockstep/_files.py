"""Files beside a run, such as reports: there whole or not at all, and no run ends because one cannot be written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lightning_lockstep._console import say

__all__ = ["write_report", "write_whole"]


def write_whole(path: Path, content: str | bytes) -> str | None:
    """Write a file beside its place and move it there, so that whoever looks finds all of it.

    Returns why that was not possible, such as ``No space left on device``; what stood there before stays.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        return error.strerror or str(error)
    return None


def write_report(path: Path, content: str | bytes) -> None:
    """Write a report into a run's folder for whoever looks there later; print why if that is not possible."""
    why = write_whole(path, content)
    if why is not None:
        say(f"lightning-lockstep: {path.name} could not be written to {path.parent}: {why}.")
