"""Bringing the ranks' findings together over the side channel; no collective, so nothing here can hang."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_lockstep.distributed import Communicator, Message, exchange
from lightning_lockstep.errors import MissingExtraError
from lightning_lockstep.overflow.activation_watch import ActivationWatch
from lightning_lockstep.overflow.picture import draw
from lightning_lockstep.overflow.report import (
    Occasion,
    RankReport,
    combined_head,
    combined_text,
    print_once,
    write,
)
from lightning_lockstep.overflow.settings import OverflowSettings

__all__ = ["Sharing"]

_log = logging.getLogger(__name__)
_ALONE = "overflow/alone"
_LONE_REPORTS = 5

# Counts the runs of this process, alike on every rank, so that no two runs share a topic.
_runs = 0


class Sharing:
    """Exchanges findings after a hit, prints them once in rank order and writes them down.

    Args:
        communicator: Of the run.
        folder: Where reports go.
        settings: What the detector was asked to do.

    Ranks: one on every rank. Rank 0 prints and writes.
    """

    def __init__(self, communicator: Communicator, folder: Path, settings: OverflowSettings) -> None:
        global _runs
        _runs += 1
        self.communicator, self.folder, self.settings = communicator, folder, settings
        self._prefix, self._meetings, self._alone = f"overflow/{_runs}", 0, 0
        channel = communicator.side_channel
        self._remove = channel.on(_ALONE, self._print_alone) if communicator.is_main else None

    def close(self) -> None:
        """Stop listening for reports of single ranks."""
        if self._remove is not None:
            self._remove()

    def hear(self, facts: Mapping[str, Any], *, to: int | None = None) -> dict[int, Any]:
        """Tell all ranks some facts and hear theirs; see :func:`lightning_lockstep.distributed.side_channel.gather`."""
        self._meetings += 1
        topic = f"{self._prefix}/{self._meetings}"
        return exchange(
            self.communicator.side_channel, topic, dict(facts), timeout=self.settings.timeout, to=to
        )

    def publish(self, report: RankReport, why: str, watch: ActivationWatch | None) -> str:
        """Print and write the reports of all ranks, after a hit that all of them know of.

        Args:
            report: This rank's.
            why: What gave it away; the same on every rank.
            watch: For the picture: the magnitudes of the steps before.

        Returns:
            The text for everybody's error, the same on every rank.
        """
        said_by = self.hear({"head": report.head(), "guilty": report.guilty, "when": asdict(report.occasion)})
        heads = {rank: said["head"] for rank, said in said_by.items()}
        # With accumulated gradients the ranks may mean different batches; the first guilty rank's counts.
        first = next((said for said in said_by.values() if said["guilty"]), next(iter(said_by.values())))
        occasion = Occasion(**first["when"])
        absent = [rank for rank in range(self.communicator.world_size) if rank not in heads]
        heads.update({rank: f"rank {rank}: no report within {self.settings.timeout:g} s" for rank in absent})
        pictured = report.guilty and watch is not None and self.settings.report_dir is not None
        history = watch.magnitudes() if pictured and watch is not None else {}
        bodies = self.hear({"text": report.text(), "json": report.as_json(), "history": history}, to=0)
        stem = f"batch-{occasion.batch_number}"
        head = combined_head(occasion, heads, why)
        if self.communicator.is_main:
            texts = {rank: heads[rank] for rank in absent} | {r: said["text"] for r, said in bodies.items()}
            text = combined_text(occasion, texts, why)
            reports = [said["json"] for said in bodies.values()]
            print_once(text)
            self._write(stem, text, reports)
            # The steps before are drawn as the rank saw them whose report is drawn.
            self._draw(stem, reports, next((h for b in bodies.values() if (h := b["history"])), {}))
        return f"{head}\nFull report: {self.folder / f'{stem}.txt'}"

    def said_alone(self) -> bool:
        """Return whether this rank has reported often enough what only it knows of; counts the call."""
        self._alone += 1
        return self._alone > _LONE_REPORTS

    def publish_alone(self, report: RankReport) -> None:
        """Have rank 0 print and write the report of this rank, which no other rank knows of; wait for nobody."""
        why = "seen on this rank alone; it does not reach the gradients"
        text = combined_text(report.occasion, {report.rank: report.text()}, why)
        body = {
            "text": text,
            "json": report.as_json(),
            "stem": f"batch-{report.occasion.batch_number}-rank-{report.rank}",
        }
        self.communicator.side_channel.post(_ALONE, body, to=0)

    def publish_trace(self, batch_number: int, text: str) -> None:
        """Print and write the traced frames of all ranks, in rank order."""
        texts = self.hear({"text": text}, to=0)
        if self.communicator.is_main:
            whole = "\n".join(said["text"] for said in texts.values())
            print_once(whole)
            self._write(f"trace-batch-{batch_number}", whole, [])

    def _print_alone(self, message: Message) -> None:
        print_once(message.body["text"])
        self._write(message.body["stem"], message.body["text"], [message.body["json"]])

    # A full disk or a broken matplotlib must not make rank 0 act differently from the others.

    def _write(self, stem: str, text: str, reports: list[Any]) -> None:
        try:
            write(self.folder, stem, text, reports)
        except OSError as error:
            _log.warning("the report of an overflow could not be written to %s: %s", self.folder, error)

    def _draw(self, stem: str, reports: list[Any], history: Mapping[Any, Any]) -> None:
        if self.settings.report_dir is None:
            return
        try:
            draw(self.folder / f"{stem}.png", reports, {int(step): seen for step, seen in history.items()})
        except MissingExtraError as error:
            _log.warning("%s", error)
        except Exception as error:
            _log.warning("the picture of an overflow could not be drawn: %s: %s", type(error).__name__, error)
