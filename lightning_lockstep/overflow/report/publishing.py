"""Collects the findings of all ranks over the side channel, prints them once and writes them to files.

No collective is involved, so nothing here can hang.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_lockstep._console import say
from lightning_lockstep._files import write_report
from lightning_lockstep.distributed import Communicator, Gather, Gathered, Message
from lightning_lockstep.distributed.failure.process_exit import writing_report
from lightning_lockstep.errors import MissingExtraError
from lightning_lockstep.overflow.detection.activation_watch import ActivationWatch
from lightning_lockstep.overflow.report.contents import (
    Occasion,
    RankReport,
    combined_head,
    combined_text,
    write,
)
from lightning_lockstep.overflow.report.picture import draw
from lightning_lockstep.overflow.settings import OverflowSettings

__all__ = ["ReportPublisher"]

_log = logging.getLogger(__name__)
_SINGLE = "overflow/single-rank"
_SINGLE_RANK_REPORTS = 5
# Ranks that replay together are at most a step apart from each other [s].
_PATIENCE = 30.0

# Counts the runs of this process, alike on every rank, so that no two runs share a topic.
_runs = 0


class ReportPublisher:
    """Collects the reports of all ranks; rank 0 prints them once, in rank order, and writes them to files."""

    def __init__(self, communicator: Communicator, folder: Path, settings: OverflowSettings) -> None:
        global _runs
        _runs += 1
        self.communicator, self.folder, self.settings = communicator, folder, settings
        self._collections, self._single_reports = 0, 0
        channel = communicator.side_channel
        self._gather = Gather(channel, f"overflow/{_runs}", timeout=settings.timeout)
        patience = min(settings.timeout, _PATIENCE)
        self._arrivals = Gather(channel, f"overflow/{_runs}/arrivals", timeout=patience)
        self._remove = channel.on(_SINGLE, self._print_single) if communicator.is_main else None

    def close(self) -> None:
        self._gather.close()
        self._arrivals.close()
        if self._remove is not None:
            self._remove()

    def collect(self, entry: Mapping[str, Any], *, to: int | None = None) -> Gathered:
        """Send this rank's entry, which JSON can hold, and return those that came in time.

        With ``to`` that rank alone receives them and waits; the others get back their own.
        """
        self._collections += 1
        return self._gather.collect(self._collections, dict(entry), to=to)

    def all_arrive(self) -> bool:
        """Return whether all ranks get here in half a minute; one that does not may be in a collective."""
        for _ in range(2):  # a late rank finds the messages of others that have left since; not a second time
            self._collections += 1
            if self._arrivals.collect(self._collections, None).missing:
                return False
        return True

    @writing_report()
    def publish(self, report: RankReport, why: str, watch: ActivationWatch | None) -> str:
        """Print and write the reports of a hit that all know of; return the error's text, the same on all."""
        gathered = self.collect(
            {"head": report.head(), "origin": report.is_origin, "occasion": asdict(report.occasion)}
        )
        missing = {rank: f"rank {rank}: no report within {gathered.timeout:g} s" for rank in gathered.missing}
        heads = {rank: entry["head"] for rank, entry in gathered.entries.items()} | missing
        # With accumulated gradients the ranks may mean different batches; that of the first origin counts.
        entries = list(gathered.entries.values())
        occasion = Occasion(**next((e for e in entries if e["origin"]), entries[0])["occasion"])
        pictured = report.is_origin and watch is not None and self.settings.report_dir is not None
        history = watch.magnitudes() if pictured and watch is not None else {}
        reports = self.collect(
            {"text": report.text(), "json": report.as_json(), "history": history}, to=0
        ).entries
        stem = f"batch-{occasion.batch_number}"
        head = combined_head(occasion, heads, why)
        if self.communicator.is_main:
            texts = missing | {rank: entry["text"] for rank, entry in reports.items()}
            text = combined_text(occasion, texts, why)
            say(text)
            as_json = [entry["json"] for entry in reports.values()]
            write(self.folder, stem, text, as_json)
            # The steps before are drawn as they were on the rank whose report is drawn.
            self._draw(stem, as_json, next((h for entry in reports.values() if (h := entry["history"])), {}))
        return f"{head}\nFull report: {self.folder / f'{stem}.txt'}"

    def may_publish_single(self) -> bool:
        """Return whether this rank may report once more what it alone knows of; counts the call."""
        self._single_reports += 1
        return self._single_reports <= _SINGLE_RANK_REPORTS

    def publish_single(self, report: RankReport) -> None:
        """Have rank 0 print and write the report of this rank, which no other rank knows of."""
        why = "seen on this rank only; it does not reach the gradients"
        body = {
            "text": combined_text(report.occasion, {report.rank: report.text()}, why),
            "json": report.as_json(),
            "batch": report.occasion.batch_number,
        }
        self.communicator.side_channel.post(_SINGLE, body, to=0)

    def publish_trace(self, batch_number: int, text: str) -> None:
        """Print and write the traced frames of all ranks, in rank order."""
        entries = self.collect({"text": text}, to=0).entries
        if self.communicator.is_main:
            whole = "\n".join(entry["text"] for entry in entries.values())
            say(whole)
            write(self.folder, f"trace-batch-{batch_number}", whole, [])

    def _print_single(self, message: Message) -> None:
        text, stem = str(message.body["text"]), f"batch-{int(message.body['batch'])}-rank-{message.sender}"
        say(text)
        write(self.folder, stem, text, [message.body["json"]])

    def _draw(self, stem: str, reports: list[Any], history: Mapping[Any, Any]) -> None:
        if self.settings.report_dir is None or not reports:
            return
        # A broken matplotlib must not make rank 0 act differently from the others.
        try:
            content = draw(reports, {int(step): seen for step, seen in history.items()})
        except MissingExtraError as error:
            _log.warning("%s", error)
        except Exception as error:
            _log.warning("the picture of an overflow could not be drawn: %s: %s", type(error).__name__, error)
        else:
            write_report(self.folder / f"{stem}.png", content)
