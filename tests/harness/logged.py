"""What is logged while a test does something."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def logged(name: str = "lightning_lockstep", level: int | None = None) -> Iterator[list[str]]:
    """Collect the messages of a logger and of those below it; ``level`` is its level meanwhile."""
    logger, handler = logging.getLogger(name), _Lines()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(before if level is None else level)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
