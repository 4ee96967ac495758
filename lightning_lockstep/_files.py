"""Files beside a run, such as reports: there whole or not at all, and no run ends because one cannot be written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lightning_lockstep._console import say

__all__ = ["write_report", "write_whole"]


def write_whole(path: Path, content: str | bytes) -> str | None:
    """Write a file beside its place and move it there, so that whoever looks finds all of it."""
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
    """Write a report for whoever looks into the folder of a run later, and print why where that is not possible.
    """
    why = write_whole(path, content)
    if why is not None:
        say(f"lightning-lockstep: {path.name} could not be written to {path.parent}: {why}.")
