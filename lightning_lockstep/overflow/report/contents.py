"""The report: what one rank found, what all ranks found together, and how it is printed and written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_lockstep._files import write_report
from lightning_lockstep.overflow.diagnosis.frames import Frame, Producer
from lightning_lockstep.overflow.diagnosis.remedy import Remedy

__all__ = ["Occasion", "RankReport", "combined_head", "combined_text", "write"]

_COLUMNS = f"{'abs min':8} {'abs max':8} metadata"
_NAMED = 12
# What a report without a producer says first, by whether its replay was clean.
_WITHOUT_PRODUCER = {
    True: "clean; the bad value did not originate here",
    False: "bad in training_step or in the module's own backward, outside of its modules",
    None: "the batch was not replayed here",
}


@dataclass(frozen=True)
class Occasion:
    """Where in the run a bad value was found."""

    epoch: int  # from 0
    step: int  # ``trainer.global_step``
    batch_number: int  # from 0, over all epochs
    batch_idx: int  # from 0, of the epoch

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch_idx}, step {self.step}"


@dataclass
class RankReport:
    """What one rank found."""

    rank: int
    host: str
    occasion: Occasion
    loss: float | None = None  # as it went into the backward; None: there was none
    frames: list[Frame] = field(default_factory=list)  # of the forward, up to the first bad one
    backward_frames: list[Frame] = field(default_factory=list)  # where the first bad value is a gradient
    producer: Producer | None = None  # of the first bad value in the forward
    backward_producer: Producer | None = None  # of the first bad gradient, from good ones
    propagators: list[str] = field(default_factory=list)  # modules that passed it on
    gradients: list[str] = field(default_factory=list)  # a line for each bad one, as reduced over all ranks
    optimizer: list[str] = field(default_factory=list)  # a line for each bad entry of a state
    remedy: Remedy = field(default_factory=Remedy)
    notes: list[str] = field(default_factory=list)
    clean: bool | None = None  # replaying gave no bad value on this rank; None: it was not replayed

    @property
    def is_origin(self) -> bool:
        """Whether a bad value was first produced on this rank."""
        return self.clean is False

    def head(self) -> str:
        """Return a few lines: what produced the bad value, and the remedy."""
        first = self.producer or self.backward_producer
        rank = f"rank {self.rank} (host {self.host})"
        if first is None:
            return f"{rank}: {_WITHOUT_PRODUCER[self.clean]}"
        lines = [f"{rank}: {first.sentence()}"]
        lines += [f"  {line}" for line in self.remedy.lines()]
        return "\n".join(lines)

    def text(self) -> str:
        """Return the whole report of this rank as printed."""
        lines = [f"--- rank {self.rank} on host {self.host}: {self.occasion}; loss {_number(self.loss)}"]
        if self.frames and self.producer is not None:
            lines += [f"Last {len(self.frames)} forward frames:", _COLUMNS, *(f.text() for f in self.frames)]
        if self.backward_frames:
            shown = len(self.backward_frames)
            lines += [f"Last {shown} backward frames:", _COLUMNS, *(f.text() for f in self.backward_frames)]
        lines.append("")
        if self.producer is not None:
            lines.append(f"Producer: {self.producer.sentence()}")
        if self.backward_producer is not None:
            lines.append(f"First bad gradient: {self.backward_producer.sentence()}")
        if self.clean:
            lines.append("Clean: replaying the batch on this rank produced no nan or inf.")
        elif self.clean is False and self.producer is None and self.backward_producer is None:
            lines.append(f"No producer: {_WITHOUT_PRODUCER[False]}.")
        lines += _listed("Passed on by", self.propagators)
        if self.rank == 0:  # they are the same on every rank
            lines += _listed("Bad gradients (as reduced over all ranks)", self.gradients)
        lines += _listed("Bad optimizer state", self.optimizer)
        lines += [f"Note: {note}" for note in self.notes]
        lines += self.remedy.lines()
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {
            "rank": self.rank,
            "host": self.host,
            **asdict(self.occasion),
            "loss": _plain(self.loss),
            "producer": asdict(self.producer) if self.producer else None,
            "backward_producer": asdict(self.backward_producer) if self.backward_producer else None,
            "propagators": self.propagators,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "remedy": asdict(self.remedy),
            "notes": self.notes,
            "frames": [_frame_json(frame) for frame in self.frames],
            "backward_frames": [_frame_json(frame) for frame in self.backward_frames],
        }


def combined_head(occasion: Occasion, heads: Mapping[int, str], why: str) -> str:
    """Return the text of the error, the same on every rank."""
    lines = [f"Detected inf/nan during batch_number={occasion.batch_number} ({occasion}): {why}."]
    return "\n".join([*lines, *(heads[rank] for rank in sorted(heads))])


def combined_text(occasion: Occasion, texts: Mapping[int, str], why: str) -> str:
    """Return the reports of all ranks in rank order, as printed and written; see :func:`combined_head`."""
    head = f"\nDetected inf/nan during batch_number={occasion.batch_number} ({occasion}): {why}."
    return "\n".join([head, *(texts[rank] for rank in sorted(texts))]) + "\n"


def write(folder: Path, stem: str, text: str, reports: Sequence[Mapping[str, Any]]) -> None:
    """Write a report as text and as JSON; where that is not possible, say so."""
    write_report(folder / f"{stem}.txt", text)
    write_report(folder / f"{stem}.json", json.dumps({"ranks": list(reports)}, indent=1))


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    more = [f"    ... and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return [f"{title}:", *(f"    {line}" for line in lines[:_NAMED]), *more]


def _frame_json(frame: Frame) -> dict[str, Any]:
    values = [
        {"label": v.label, "bad": v.bad, **(v.statistics.as_json() if v.statistics else {"kind": v.kind})}
        for v in frame.values
    ]
    return {"module": frame.module, "type": frame.type, "bad": frame.bad, "values": values}


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
