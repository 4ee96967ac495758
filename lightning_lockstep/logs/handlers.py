"""Where records go: the console of rank 0, this rank's file, and, for warnings, the collector on rank 0."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from pathlib import Path

from lightning_lockstep.logs.formats import JsonFormat, TextFormat
from lightning_lockstep.logs.lines import call_of
from lightning_lockstep.logs.sender import LineSender

__all__ = ["ConsoleHandler", "ConsoleTakeover", "RankFile", "WarningHandler"]


class ConsoleHandler(logging.Handler):
    """Writes to the console, above a progress bar where there is one."""

    def __init__(self, rank: int, *, level: int | str, colour: bool | None) -> None:
        super().__init__(level)
        if colour is None:
            colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self.setFormatter(TextFormat(rank, colour=colour))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _write_above_bar(self.format(record))
        except (OSError, ValueError):
            self.handleError(record)

    def flush(self) -> None:
        if sys.stderr is not None and not sys.stderr.closed:
            sys.stderr.flush()


class RankFile(logging.FileHandler):
    """One file per rank, with everything that rank logs; what was collected from ranks is in their files."""

    def __init__(self, folder: Path, rank: int, *, style: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ending = "jsonl" if style == "json" else "log"
        super().__init__(folder / f"rank-{rank}.{ending}", encoding="utf-8", delay=True)
        self.setFormatter(JsonFormat(rank) if style == "json" else TextFormat(rank))
        self.addFilter(lambda record: not getattr(record, "lockstep_collected", False))


class WarningHandler(logging.Handler):
    """Sends warnings to the collector on rank 0, so that one of the ranks' equal ones is printed.

    Rank 0 prints its own at once, which the collector takes into account.
    """

    def __init__(self, sender: LineSender) -> None:
        super().__init__(logging.WARNING)
        self._sender = sender
        self._repeats: Counter[tuple[str, int, str]] = Counter()
        # What names its ranks was collected, or is printed by every rank on its own console.
        self.addFilter(lambda record: not hasattr(record, "lockstep_ranks"))

    def emit(self, record: logging.LogRecord) -> None:
        call = call_of(record)
        key = (record.name, record.levelno, call[1])
        self._sender.send_once(call, repeat=self._repeats[key], printed=self._sender.channel.rank == 0)
        self._repeats[key] += 1


class ConsoleTakeover:
    """Puts handlers in the place of the console handlers of all loggers, and undoes it."""

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
    # One write, so that lines of other processes do not get between the text and its end.
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
