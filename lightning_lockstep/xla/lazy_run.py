"""A run whose values are read only where they are logged; long compilations announced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from lightning_lockstep._doors.lightning import CPUAccelerator, Trainer
from lightning_lockstep._doors.lightning_internals import (
    keep_counts_of_step_values,
    logs_this_step,
    read_progress_values_when,
)
from lightning_lockstep._text import say
from lightning_lockstep.xla.runtime import compilations_begun_and_done

# -- Lightning's accelerator for XLA devices on the CPU --


class XLADevices(CPUAccelerator):
    """Virtual XLA devices on the CPU, which Lightning's accelerator for XLA takes for no devices."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: torch-xla has the devices."""


# -- Compilations of torch-xla that take long are announced while they run, so that nobody thinks the run
# hangs


# The first two steps compile as a matter of course: the second has the optimizer's state, which the first had not.
_FIRST_STEPS = 2
_AGAIN_AFTER = 60.0  # a compilation that takes still longer is announced again [s]


@dataclass
class CompilationWatch:
    """Decides what is printed about compilations, from two counts and a clock."""

    after: float  # how long a compilation takes until it is announced [s]
    _done: int = 0
    # How many have begun and are not done while none runs: what was there before the first look.
    _idle: int | None = None
    _begun_at: float | None = None
    _said_at: float | None = None

    def look(self, begun: int, done: int, now: float, where: Callable[[], str]) -> str | None:
        """Return what is to be printed now, if anything, by the counts of all compilations so far."""
        running, has_ended, self._done = begun - done, done > self._done, done
        if self._idle is None:
            self._idle = running
            return None
        self._idle = min(self._idle, running)
        text = self._is_done(now) if has_ended else None
        # Also where another one has ended since the last look.
        if self._begun_at is None and running > self._idle:
            self._begun_at = now
        if text is not None or self._begun_at is None:
            return text
        return self._is_running(self._begun_at, now, where)

    def _is_running(self, begun_at: float, now: float, where: Callable[[], str]) -> str | None:
        since = now - begun_at
        if self._said_at is None and since >= self.after:
            self._said_at = now
            return f"torch-xla is compiling {where()}"
        if self._said_at is not None and now - self._said_at >= _AGAIN_AFTER:
            self._said_at = now
            return f"torch-xla is still compiling, for {since:.0f} s now"
        return None

    def _is_done(self, now: float) -> str | None:
        begun_at, said_at = self._begun_at, self._said_at
        self._begun_at = self._said_at = None
        return None if said_at is None or begun_at is None else f"compiled in {now - begun_at:.0f} s"


def where_in_run(trainer: Trainer, steps_made: int) -> str:  # of this fit, not those before a resume
    """Return what a Trainer is at, for an announcement, from another thread than its own."""
    if trainer.sanity_checking:
        return "validation, for the check before training"
    if not trainer.training:
        stage = "test" if trainer.testing else "prediction" if trainer.predicting else "validation"
        return f"a batch of {stage}"
    if steps_made < _FIRST_STEPS:
        return f"training step {steps_made + 1} of the first {_FIRST_STEPS} of this fit, which always compile"
    return f"training step {trainer.global_step + 1}; the callback RecompileMonitor shows why"


class CompilationAnnouncer:
    """Announces compilations that take more than a second, from a thread of its own; rank 0 prints."""

    def __init__(
        self,
        trainer: Trainer,
        steps_made: Callable[[], int],  # optimizer steps of this fit
        *,
        after: float = 1.0,  # [s]
        interval: float = 0.25,  # between two looks at torch-xla's counters [s]
    ) -> None:
        self._trainer, self._steps_made, self._interval = trainer, steps_made, interval
        self._watch = CompilationWatch(after)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-compilations", daemon=True)

    def start(self) -> None:
        if self._trainer.is_global_zero:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._look()
        while not self._stopped.wait(self._interval):
            self._look()
        self._look()  # of one that was announced the end is printed too

    def _look(self) -> None:
        begun, done = compilations_begun_and_done()
        text = self._watch.look(
            begun, done, time.monotonic(), lambda: where_in_run(self._trainer, self._steps_made())
        )
        if text is not None:
            say(f"lightning-lockstep: {text}.")


# -- A run on XLA devices that reads values from them only where they are logged, and announces what it
# compiles


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
