"""A run on XLA devices that reads values from them only where they are logged, and announces what it compiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_lockstep._lightning.internals import (
    keep_counts_of_step_values,
    logs_this_step,
    read_progress_values_when,
)
from lightning_lockstep.xla.announcement import CompilationAnnouncer

__all__ = ["LazyRun"]


class LazyRun:
    """What stands between a Trainer and XLA devices while it runs.

    Lightning reads each value of the progress bar from the device at every step, twice; the host then waits for the
    step rather than prepare the next one. Here that is read every ``log_every_n_steps`` steps, as for the loggers; in
    between the bar shows what was read last. Nor does the first step of a new epoch compile again because Lightning has
    reset what the last one logged.
    """

    def __init__(self, trainer: Any, steps_made: Callable[[], int]) -> None:  # steps of this fit
        announcer = CompilationAnnouncer(trainer, steps_made)
        announcer.start()
        self._undo = ExitStack()
        self._undo.callback(announcer.stop)
        self._undo.callback(keep_counts_of_step_values(trainer))
        if not trainer.fast_dev_run:
            self._undo.callback(read_progress_values_when(trainer, lambda: logs_this_step(trainer)))

    def end(self) -> None:
        self._undo.close()
