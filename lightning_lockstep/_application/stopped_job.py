"""How an error of the program gets past Hydra, and out of the process of a job, to the program that prints it."""

from __future__ import annotations

from typing import Any

from lightning_lockstep.distributed.failure.process_exit import leaving
from lightning_lockstep.distributed.failure.uncaught import error_from_bytes, error_to_bytes
from lightning_lockstep.distributed.process_group import process_group_exists

__all__ = ["Stop", "StopElsewhere", "ranks_run"]


class Stop(BaseException):
    """Carries an error past Hydra, which would print it in its own way and lose its exit code."""

    def __init__(self, error: BaseException, *, running: bool) -> None:
        super().__init__(error)
        self.error = error
        self.running = running  # ranks were, when it was raised


class StopElsewhere(Exception):  # noqa: N818
    """Carries an error out of a job in another process: the program that reads the job's result finds a `Stop`."""

    def __reduce__(self) -> tuple[Any, ...]:
        (error,) = self.args
        error = error.error if isinstance(error, Stop) else error
        return _stop, (error_to_bytes(error), ranks_run())


def _stop(sent: bytes, running: bool) -> Stop:
    return Stop(error_from_bytes(sent), running=running)


def ranks_run() -> bool:
    """Return whether ranks of this program run, or have run and failed."""
    return leaving() or process_group_exists()
