"""The line below the rows with the checks that still run; only on a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.status import Status as Spinner

__all__ = ["Progress", "Running"]

# A terminal is at least so wide; a longer line would wrap and not be wiped.
_LONGEST = 78


class Running(Protocol):
    """Checks that run, here or elsewhere."""

    names: tuple[str, ...]

    def running(self) -> dict[str, float]:
        """Return those that run now, each with how long it has [s]."""


class Progress:
    """Shows the line while its body runs, and wipes it after."""

    def __init__(self, to: Console, checks: Running) -> None:
        self._checks, self._ended = checks, 0
        self._line = Spinner("", console=to) if to.is_terminal else None

    def __enter__(self) -> Progress:
        if self._line is not None:
            self.tick()
            self._line.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.stop()

    def tick(self) -> None:
        """Update the line."""
        if self._line is not None:
            running = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self._checks.running().items())
            text = f"{self._ended} of {len(self._checks.names)} checks ended; running: {running or '-'}"
            self._line.update(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ...")

    def has_ended(self) -> None:
        """Count one more check that has ended."""
        self._ended += 1
        self.tick()
