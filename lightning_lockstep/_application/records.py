"""What a run leaves: what its loggers are given, the closing table, `failure.json`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_lockstep._application.masking import Mask
from lightning_lockstep._lightning import Callback, WandbLogger, rank_zero_only
from lightning_lockstep._run_folder import RunFolder
from lightning_lockstep._system import write_report
from lightning_lockstep._text import counted
from lightning_lockstep.distributed.failure.process_exit import exit_report_of, set_exit_report
from lightning_lockstep.distributed.failure.record import FailureRecord, describe_error, keep_failure
from lightning_lockstep.errors import RankFailedError
from lightning_lockstep.steps.patching import put_in_place

# -- What a run gives to its loggers besides metrics, and where they write --


class LogConfiguration(Callback):
    """Gives the configuration of the run to its loggers as hyperparameters, below the name `config`; masks secrets."""

    def __init__(self, config: DictConfig) -> None:
        self._mask = Mask(config)
        self._config = self._mask.masked(config)
        self._trains = bool(config.get("fit"))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Log it once, in the process of the rank, before Lightning logs the model's own hyperparameters."""
        if self._config and (stage == "fit" or not self._trains):
            for logger in trainer.loggers:
                # The model may have been given a secret too, and have saved its hyperparameters.
                put_in_place(logger, "log_hyperparams", partial(self._log_masked, logger.log_hyperparams))
                logger.log_hyperparams({"config": self._config})
            self._config = {}

    def _log_masked(self, log: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> None:
        log(self._mask.masked(params), *args, **kwargs)


def places(loggers: list[Any]) -> dict[str, str]:
    """Return where each logger has written on this machine, as rows of the closing table: a file or a folder."""
    found: dict[str, str] = {}
    for logger in loggers:
        place = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        # The stand-in of a run without logs has a method for every name.
        if isinstance(place, (str, os.PathLike)):
            metrics = Path(place, "metrics.csv")
            found[f"log ({type(logger).__name__})"] = str(metrics if metrics.exists() else place)
    return found


def finish(loggers: list[Any], *, failed: bool) -> None:
    """End the runs of loggers that hold one open until the process ends, so that the next job begins its own."""
    if any(isinstance(logger, WandbLogger) for logger in loggers):
        import wandb

        if wandb.run is not None:
            wandb.finish(exit_code=int(failed))


# -- `failure.json` in the run folder, if the strategy has not written it --


def keep_unless_kept(error: BaseException, folder: Path, trainer: Any = None, steps: int = 0) -> None:
    """Write what has ended a run to its folder, if its strategy has not; every rank may call it, rank 0 writes."""
    is_main = trainer.is_global_zero if trainer else not getattr(rank_zero_only, "rank", 0)
    if isinstance(error, SystemExit) or not is_main or exit_report_of(error).text:
        return
    # An error that was raised on another rank first comes with the record of that rank.
    record = error.record if isinstance(error, RankFailedError) else None
    if not isinstance(record, FailureRecord):
        where: dict[str, Any] = {"stage": "setup"}
        if trainer:
            where = {
                "epoch": trainer.current_epoch,
                "step": max(trainer.global_step, steps),  # the Trainer of spawned ranks has made none
                "stage": str(trainer.state.stage or "setup"),
            }
        record = describe_error(error, 0, trainer.world_size if trainer else 1, lambda: where)
    if not record.file:
        record = keep_failure(record.in_folder(folder))
        set_exit_report(error, replace(exit_report_of(error), text=record.saved_to()))


# -- The report at the end of a run: a table, and `summary.json` --

_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Summary:
    metrics: dict[str, float]  # the last value of each
    steps: int  # of the optimizer
    epochs: int  # begun and ended
    ranks: int
    samples_per_second: float | None  # of all ranks in training, evaluation left out
    wall_time: float  # from the first to the last line of the run [s]
    files: dict[str, str]  # where things are, by what they are


def write(summary: Summary, folder: Path) -> None:
    """Write `summary.json` into the run folder; say so if that is not possible."""
    told = {name: value if math.isfinite(value) else repr(value) for name, value in summary.metrics.items()}
    text = json.dumps({**asdict(summary), "metrics": told}, indent=2)
    write_report(folder / _FILE, text + "\n")


def remove_earlier_summary(folder: Path) -> None:
    with suppress(OSError):
        (folder / _FILE).unlink()


def read_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics that rank 0 has written into the run folder; none if it could not."""
    found = RunFolder(str(folder)).record(_FILE) or {"metrics": {}}
    return {name: float(value) for name, value in found["metrics"].items()}


def show(summary: Summary) -> None:
    """Print the result as a table, and below it where things are: a line each, so that a path can be copied."""
    table = Table(title="lightning-lockstep: run finished", show_header=False, title_justify="left")
    for name in sorted(summary.metrics, key=_order):
        table.add_row(name, f"{summary.metrics[name]:.4f}")
    table.add_section()
    epochs, ranks = counted(summary.epochs, "epoch"), counted(summary.ranks, "rank")
    table.add_row("steps", f"{summary.steps} in {epochs} on {ranks}")
    if summary.samples_per_second is not None:
        table.add_row("samples/s", f"{summary.samples_per_second:,.0f}")
    table.add_row("wall time", f"{summary.wall_time:.1f} s")
    # With hydra.job.chdir the shell is in another folder than the run.
    console, here = Console(), Path(get_original_cwd() if HydraConfig.initialized() else Path.cwd())
    console.print(table)
    for name, path in summary.files.items():
        shown = Path(path).relative_to(here) if Path(path).is_relative_to(here) else Path(path)
        console.print(Text(f"{name}: {shown}"), soft_wrap=True)


def _order(name: str) -> tuple[int, str]:
    first = name.replace("/", "_").split("_", 1)[0]
    return ({"train": 0, "val": 1, "test": 2}.get(first, 3), name)
