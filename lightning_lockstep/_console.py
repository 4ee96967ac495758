"""What this package prints to the standard error stream, where progress bars live too."""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["say"]


def say(text: str) -> None:
    """Print ``text`` in one piece, so that lines of other processes do not get into it.

    A stream that is closed, full or a broken pipe ends no run: what cannot be written is dropped.
    """
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
        sys.stderr.flush()
