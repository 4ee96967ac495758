"""Where records go: the console of rank 0, this rank's file, and, for warnings, rank 0's ear."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lightning_lockstep.logs.collector import LineSender
from lightning_lockstep.logs.formats import ConsoleFormat, JsonFormat, TextFormat
from lightning_lockstep.logs.lines import said_of

__all__ = ["ConsoleHandler", "RankFile", "Takeover", "WarningHandler"]


class ConsoleHandler(logging.Handler):
    """Writes to the console without tearing a progress bar apart.

    Args:
        rank: This rank.
        level: Lowest level that is written.
        colour: Whether to write colours; ``None`` does so on a terminal.
        skip: Returns whether a record is printed by somebody else.
    """

    def __init__(
        self,
        rank: int,
        *,
        level: int | str,
        colour: bool | None,
        skip: Callable[[logging.LogRecord], bool],
    ) -> None:
        super().__init__(level)
        self._skip = skip
        if colour is None:
            colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self.setFormatter(ConsoleFormat(rank, colour=colour))

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`."""
        if self._skip(record):
            return
        try:
            _write_above_bar(self.format(record))
        except (OSError, ValueError):
            self.handleError(record)

    def flush(self) -> None:
        """See :meth:`logging.Handler.flush`."""
        if sys.stderr is not None and not sys.stderr.closed:
            sys.stderr.flush()


class RankFile(logging.FileHandler):
    """One file for each rank, with everything that rank says.

    Args:
        folder: Where the files of all ranks are.
        rank: This rank.
        style: ``text``, or ``json`` for one JSON object a line.
    """

    def __init__(self, folder: Path, rank: int, *, style: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ending = "jsonl" if style == "json" else "log"
        super().__init__(folder / f"rank-{rank}.{ending}", encoding="utf-8", delay=True)
        self.setFormatter(JsonFormat(rank) if style == "json" else TextFormat(rank))

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`; what was collected from ranks stands in their files already."""
        if not getattr(record, "lockstep_collected", False):
            super().emit(record)


class WarningHandler(logging.Handler):
    """Sees to it that of the ranks' equal warnings one is printed.

    Rank 0 prints its own at once and tells the collector so; the others send theirs.

    Args:
        rank: This rank.
        sender: Returns what takes lines to rank 0, or ``None`` while there is nothing.
    """

    def __init__(self, rank: int, sender: Callable[[], LineSender | None]) -> None:
        super().__init__(logging.WARNING)
        self._rank, self._sender = rank, sender
        self._said: Counter[tuple[str, int, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`."""
        if getattr(record, "lockstep_collected", False):
            return
        sender = self._sender()
        if sender is None:
            return
        said = said_of(record)
        key = (record.name, record.levelno, said[1])
        sender.send_once(said, turn=self._said[key], printed=self._rank == 0)
        self._said[key] += 1


class Takeover:
    """Puts handlers in the place of the console handlers of all loggers, and undoes it.

    Args:
        handlers: What to put on the root logger.
    """

    def __init__(self, handlers: list[logging.Handler]) -> None:
        self.handlers = handlers
        self._removed: list[tuple[logging.Logger, logging.Handler]] = []
        self._propagation: list[logging.Logger] = []

    def begin(self) -> None:
        """Take the console over: of the root logger, of Lightning's, of every other that has its own."""
        root = logging.getLogger()
        for logger in [root, *_existing_loggers()]:
            own = [handler for handler in logger.handlers if _writes_to_console(handler)]
            for handler in own:
                logger.removeHandler(handler)
                self._removed.append((logger, handler))
            if own and logger is not root and not logger.propagate and not logger.handlers:
                logger.propagate = True
                self._propagation.append(logger)
        for handler in self.handlers:
            root.addHandler(handler)

    def end(self) -> None:
        """Undo it."""
        root = logging.getLogger()
        for handler in self.handlers:
            root.removeHandler(handler)
            handler.close()
        for logger, handler in self._removed:
            logger.addHandler(handler)
        for logger in self._propagation:
            logger.propagate = False
        self._removed.clear()
        self._propagation.clear()


def _existing_loggers() -> list[logging.Logger]:
    known = logging.Logger.manager.loggerDict.values()
    return [logger for logger in known if isinstance(logger, logging.Logger)]


def _writes_to_console(handler: logging.Handler) -> bool:
    if isinstance(handler, logging.FileHandler):
        return False
    rich_console = type(handler).__name__ == "RichHandler"
    stream = getattr(handler, "stream", None)
    consoles = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return rich_console or (isinstance(handler, logging.StreamHandler) and stream in consoles)


def _write_above_bar(text: str) -> None:
    """Write to standard error, above a progress bar if there is one.

    rich redirects ``sys.stderr`` while its bar is shown; tqdm has to be asked.
    """
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None and getattr(tqdm, "_instances", None):
        tqdm.write(text, file=sys.stderr)
        return
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
