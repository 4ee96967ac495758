"""Logs of all ranks, in rank order, on one console and in one file per rank."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_lockstep._settings import LEVELS, Faults
from lightning_lockstep.callbacks.ends_with_run import EndsWithRun
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.logs import logger
from lightning_lockstep.logs.formats import ConsoleHandler, RankFile, WarningHandler, take_over_console
from lightning_lockstep.logs.logger import LineSender

# How long rank 0 waits at the end of a run for lines of other ranks that are under way [s].
_AT_THE_END = 1.0


class RankOrderedLogging(EndsWithRun):
    """Makes the logs of a run with many ranks readable.

    The console shows rank 0's own lines, the lines that any rank logs with ``in_order=True``, and each warning once,
    even if several ranks give it; each rank's file has all that this rank logs. The levels of loggers stay as they are.

    Args:
        level: Lowest level on the console. A logger whose own level is higher, such as Python's default, gives less.
        files: ``text`` or ``json`` (one object per line) for ``rank-N.log`` or ``rank-N.jsonl``; ``None`` for no files.
        folder: Where the files go; by default ``logs`` in the Trainer's log folder.
        order_timeout: Longest time that an in-order line waits for those of other ranks [s].

    Raises:
        ConfigurationError: One message with every argument that cannot be used.

    Ranks: every rank has one. At start-up it opens the side channel and agrees on the folder; afterwards an
    in-order line, and a warning, is one message to rank 0. No collective.
    """

    def __init__(
        self,
        *,
        level: str = "INFO",
        files: Literal["text", "json"] | None = "text",
        folder: str | Path | None = None,
        order_timeout: float = 5.0,
    ) -> None:
        super().__init__()
        faults = Faults()
        is_level = isinstance(level, str) and level.upper() in LEVELS
        faults.check(is_level, "level", level, f"one of {', '.join(LEVELS)}")
        faults.choice("files", files, ("text", "json", None))
        faults.number("order_timeout", order_timeout, what="seconds", above=0, such_as=5)
        faults.raise_all()
        self.level, self.files, self.folder = level.upper(), files, folder
        self.order_timeout = order_timeout
        self._sender: LineSender | None = None  # there is one if there are several ranks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take over the console and open this rank's file. Ranks: all, together; with files, two small collectives."""
        global _active
        if _active is not None:
            _active.at_end.close()  # a fit before this one ended with an exception, perhaps in a notebook
        _active = self
        communicator = current_communicator()
        if communicator.world_size > 1:
            self._sender = communicator.side_channel.get_or_create(LineSender)
            if self._sender.collector is not None:
                self._sender.collector.windows.timeout = self.order_timeout
        console = ConsoleHandler(communicator.rank, level=self.level)
        if communicator.rank != 0:
            # Only lines that name their rank are printed here; their caller wants them from every rank.
            console.addFilter(lambda record: hasattr(record, "lockstep_ranks"))
        handlers: list[logging.Handler] = [console]
        if self._sender is not None:
            handlers.append(WarningHandler(self._sender))
        if self.files is not None:
            run_folder = trainer.log_dir or trainer.default_root_dir
            folder = communicator.broadcast(str(self.folder or Path(run_folder, "logs")))
            file = communicator.agreed(partial(self._open_file, communicator.rank, Path(folder), self.files))
            handlers.append(file)
            logger.local_handlers.append(file)
            self.at_end.callback(logger.local_handlers.remove, file)
        take_over_console(handlers, self.at_end)
        # Under pytest, which collects warnings itself, this does nothing with them.
        if warnings.showwarning.__module__ == "warnings":
            logging.captureWarnings(True)
            self.at_end.callback(logging.captureWarnings, False)
        self.at_end.callback(self._print_the_rest)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Send what is queued; the files stay open for what is logged until the process ends."""
        if self._sender is not None:
            self._sender.flush()

    def _open_file(self, rank: int, folder: Path, style: str) -> RankFile:
        try:
            return RankFile(folder, rank, style=style)
        except OSError as error:
            raise ConfigurationError(
                f"folder={str(folder)!r}: expected a folder in which every rank can make its log file, or files=None"
                f" ({error})."
            ) from error

    def _print_the_rest(self) -> None:
        """Print what is held back, before the former handlers are back: those may not print INFO."""
        if self._sender is not None:
            self._sender.flush()
            if self._sender.collector is not None:
                self._sender.collector.settle(min(self.order_timeout, _AT_THE_END))
            self._sender = None


_active: RankOrderedLogging | None = None
