"""What is written of a run that outlives its ranks: each row of its loggers once, and who was lost."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_lockstep._lightning import CSVLogger, ExperimentWriter
from lightning_lockstep._system import write_report, write_whole
from lightning_lockstep._text import counted, ranks_in_words
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure.members import Membership
from lightning_lockstep.steps.patching import assigned, call_around, do_nothing

# -- Rows of loggers, which rank 0 alone writes --

_ROWS_KEPT = 8
Row = tuple[int | None, frozenset[str]]  # what tells it from others: the step, and names of the values


class LoggedRows:
    """Rows that loggers were given: the last ones are kept for the next rank 0, and none is written twice."""

    def __init__(self) -> None:
        self.last: dict[Row, dict[str, Any]] = {}
        self._written: set[Row] = set()  # before a loss
        self._repeats_until = -1  # the last step that is made again

    def go_on_in_one_place(self, trainer: Any) -> None:
        """Give each rank the places where rank 0 logs, because it may become rank 0. Ranks: all; a broadcast."""
        loggers = [logger for logger in trainer.loggers if hasattr(logger, "_version")]
        versions = [logger.version if trainer.is_global_zero else None for logger in loggers]
        for logger, version in zip(loggers, current_communicator().broadcast(versions), strict=False):
            logger._version = version

    def follow(self, trainer: Any) -> None:
        for logger in trainer.loggers:
            call_around(logger, log_metrics=self._log)

    def _log(self, log: Any, metrics: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        row = row_of(step, metrics)
        if step is None or row not in self._written:  # a row of the program's own may have no step
            log(metrics=metrics, step=step, **options)
        if step is not None and row not in self._written:
            self.last = dict([*self.last.items(), (row, dict(metrics))][-_ROWS_KEPT:])

    def begin_step(self, step: int) -> None:
        if step > self._repeats_until:
            self.forget_written()

    def forget_written(self) -> None:
        """Let all rows be written, because those that come now are new."""
        self._written = set()

    def go_on(self, trainer: Any, last: dict[Row, dict[str, Any]], repeats_until: int) -> None:
        """Go on after the last rows of another rank, of which a lost rank 0 may have written some."""
        self.last, self._repeats_until = last, repeats_until
        self._written = set()  # no row counts as written while `continue_csv` logs
        written = set(last)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, CSVLogger):
                written |= continue_csv(logger, last)
        self._written = written


def row_of(step: int | None, values: Mapping[str, Any]) -> Row:
    names = (name for name, value in values.items() if value != "" and name not in ("step", "epoch"))
    return step, frozenset(names)


def continue_csv(logger: Any, rows: Mapping[Row, Mapping[str, Any]]) -> set[Row]:
    """Have a CSV logger append to the file of its version; write the rows that are not there; return what was."""
    with assigned(ExperimentWriter, _check_log_dir_exists=do_nothing):  # the check would delete the file
        writer = logger.experiment
    path = Path(logger.log_dir) / "metrics.csv"
    found = set[Row]()
    if path.is_file():
        text = path.read_bytes()
        write_whole(path, text[: text.rfind(b"\n") + 1])  # the lost rank may have ended within a line
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            found = {row_of(int(row["step"] or 0), row) for row in reader}
            writer.metrics_keys = list(reader.fieldnames or ())
    for row, values in rows.items():
        if row not in found:
            logger.log_metrics(metrics=values, step=row[0])
    writer.save()
    return found


# -- Who was lost --

#: The file in which rank 0 keeps what was lost.
LOST_FILE = "lost.json"


class Losses:
    """What is said of losses, once the ranks that are left have gone on."""

    def __init__(self, strategy: Any, membership: Membership) -> None:
        self._strategy, self._membership = strategy, membership
        self._untold: dict[str, Any] | None = None
        self._is_step = False  # whether the loss was at a step, so that the call does not begin again

    def forget_earlier_run(self) -> None:
        folder = self._strategy.supervisor.folder()
        if self._strategy.is_global_zero and folder is not None and not self._membership.reported_losses():
            (folder / LOST_FILE).unlink(missing_ok=True)

    def note(self, where: str, *, is_step: bool) -> None:
        """Note who was lost at a step or in a call; end the run if the same step kills a member twice. Ranks: all."""
        membership, told = self._membership, self._membership.reported_losses()
        self._untold, self._is_step = None, is_step
        lost = membership.lost_since(told[-1]["generation"] if told else 0)
        members = len(membership.current.members)
        if not (lost or (told and members > told[-1]["went_on_with"])):  # a process has joined
            return
        earlier = [one["text"] for one in told if one["ranks"] and one["at"] == where]
        if is_step and lost and earlier:
            membership.send_request(f"it was not the first one there: {earlier[-1]}")
            raise membership.error()
        reasons = (
            f"host {record.host}"
            if record.kind == "vanished"
            else record.summary.removeprefix("killed by ").partition(" ")[0]
            for _, record in lost
        )
        self._untold = {
            "generation": membership.current.number,
            "ranks": sorted(record.rank for _, record in lost),
            "pids": [record.pid for _, record in lost],
            "why": ", ".join(dict.fromkeys(reasons)),
            "at": where,
            "went_on_with": members,
            "seen": (lost[0][0] if lost else membership.current).since,
        }

    def tell(self) -> None:
        """Say, once, that this rank goes on after a loss. Ranks: any, alone."""
        if self._untold is None:
            return
        loss, self._untold = self._untold, None
        loss["seconds"] = round(time.time() - loss["seen"], 3)
        loss["text"] = _in_words(loss, is_step=self._is_step)
        self._membership.report_loss(loss)
        if self._strategy.is_global_zero and (folder := self._strategy.supervisor.folder()) is not None:
            told = json.dumps({"lost": self._membership.reported_losses()}, indent=2)
            write_report(folder / LOST_FILE, f"{told}\n")


def _in_words(loss: Mapping[str, Any], *, is_step: bool) -> str:
    """Return what is printed of a loss."""
    verb = "was" if len(loss["ranks"]) == 1 else "were"
    went_on = f"went on with {counted(loss['went_on_with'], 'rank')} after {loss['seconds']:.1f} s"
    again = "no step was lost" if is_step else "the call of the Trainer began again"
    if not loss["ranks"]:
        return f"a new process joined {loss['at']}; {went_on}"
    return f"{ranks_in_words(loss['ranks'])} {verb} lost {loss['at']} ({loss['why']}); {went_on}; {again}"
