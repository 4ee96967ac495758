"""`failure.json` in the run folder: what is known of the failure that came first, for who looks there later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_lockstep._files import write_report
from lightning_lockstep.distributed.failure.record import FailureRecord, describe_error
from lightning_lockstep.errors import RankFailedError

__all__ = ["FAILURE_FILE", "keep_failure"]

FAILURE_FILE = "failure.json"


def keep_failure(trainer: Any, error: BaseException) -> None:
    """Write what has ended a run to its folder; every rank may call it, rank 0 writes.

    An error that was raised on another rank first comes with the record of that rank.
    """
    if isinstance(error, (SystemExit, KeyboardInterrupt)) or not trainer.is_global_zero:
        return
    record = error.record if isinstance(error, RankFailedError) else None
    if not isinstance(record, FailureRecord):
        record = describe_error(error, trainer.global_rank, trainer.world_size, lambda: _where(trainer))
    write_report(Path(trainer.default_root_dir, FAILURE_FILE), record.to_json() + "\n")


def _where(trainer: Any) -> Mapping[str, Any]:
    return {
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "stage": str(trainer.state.stage or "setup"),
    }
