"""What all ranks have found, put together, drawn, printed and written."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_lockstep._system import write_report
from lightning_lockstep._text import say
from lightning_lockstep.distributed import Communicator, Gather, Gathered
from lightning_lockstep.distributed.failure.attempt import attempt_on
from lightning_lockstep.numerics.statistics import json_number
from lightning_lockstep.overflow.frames import Frame, Producer
from lightning_lockstep.overflow.replay import Occasion, Remedy
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.patching import replaced

# -- The report: what one rank found, what all ranks found together, and how it is printed and written --

COLUMNS = f"{'abs min':8} {'abs max':8} metadata"
_NAMED = 12
# What a report without a producer says first, by whether its replay was clean.
_WITHOUT_PRODUCER = {
    True: "clean; the bad value did not originate here",
    False: "code of training_step or of the LightningModule's own backward made it; no submodule did",
    None: "the batch was not replayed here, or not to its end",
}


@dataclass
class RankReport:
    rank: int
    host: str
    occasion: Occasion
    loss: float | None = None  # as it went into the backward; None: there was none
    frames: list[Frame] = field(default_factory=list)  # of the forward, up to the first bad one
    backward_frames: list[Frame] = field(default_factory=list)  # if the first bad value is a gradient
    producer: Producer | None = None  # of the first bad value in the forward
    backward_producer: Producer | None = None  # of the first bad gradient, from good ones
    propagators: list[str] = field(default_factory=list)  # modules that passed it on
    gradients: list[str] = field(default_factory=list)  # a line for each bad one, as reduced over all ranks
    remedy: Remedy = field(default_factory=Remedy)
    notes: list[str] = field(default_factory=list)
    clean: bool | None = None  # replaying gave no bad value on this rank; None: it was not replayed to its end

    def conclusion(self) -> str:
        first = self.producer or self.backward_producer
        return _WITHOUT_PRODUCER[self.clean] if first is None else first.sentence()

    def head(self) -> str:
        first = f"rank {self.rank} (host {self.host}): {self.conclusion()}"
        return "\n  ".join([first, *self.remedy.lines()])

    def text(self) -> str:
        loss = "none" if self.loss is None else f"{self.loss:.6g}"
        lines = [f"--- rank {self.rank} on host {self.host}: {self.occasion}; loss {loss}"]
        forward = self.frames if self.producer is not None else []
        for kind, frames in (("forward", forward), ("backward", self.backward_frames)):
            if frames:
                lines += [f"Last {len(frames)} {kind} frames:", COLUMNS, *(frame.text() for frame in frames)]
        said = {
            True: "Clean: replaying the batch on this rank produced no nan or inf.",
            False: f"Producer: {self.conclusion()}",
            None: self.conclusion(),
        }
        lines += ["", said[self.clean]]
        lines += _listed("Passed on by", self.propagators)
        if self.rank == 0:  # they are the same on every rank
            lines += _listed("Bad gradients (as reduced over all ranks)", self.gradients)
        lines += [f"Note: {note}" for note in self.notes]
        lines += self.remedy.lines()
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            **asdict(self.occasion),
            "loss": json_number(self.loss),
            "frames": [_frame_json(frame) for frame in self.frames],
            "backward_frames": [_frame_json(frame) for frame in self.backward_frames],
        }


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    more = [f"    ... and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return [f"{title}:", *(f"    {line}" for line in lines[:_NAMED]), *more]


def combined(occasion: Occasion, parts: Mapping[int, str], why: str) -> str:
    """Return what all ranks have to say, in rank order."""
    title = f"Detected inf/nan during batch_number={occasion.batch_number} ({occasion}): {why}."
    return "\n".join([title, *(parts[rank] for rank in sorted(parts))])


def _frame_json(frame: Frame) -> dict[str, Any]:
    values = [
        {"label": v.label, "bad": v.bad, **(v.statistics.as_json() if v.statistics else {"kind": v.kind})}
        for v in frame.values
    ]
    return {"module": frame.module, "type": frame.type, "bad": frame.bad, "values": values}


# -- The picture of a report: how large each module's outputs were, against the largest number of the format --

_FLOOR = 1e-8


def draw(reports: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a PNG of the modules' outputs in the first report with a producer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    report = next((r for r in reports if r["producer"] or r["backward_producer"]), reports[0])
    frames = report["frames"] or report["backward_frames"]
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    _draw_frames(figure.subplots(), frames, *_limit(frames))
    first = report["producer"] or report["backward_producer"] or {"module": "no module of this rank"}
    figure.suptitle(
        f"rank {report['rank']}, epoch {report['epoch']}, batch {report['batch_idx']}, step {report['step']}:"
        f" first produced by {first['module'] or 'the LightningModule'}"
    )
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _draw_frames(axes: Any, frames: Sequence[Mapping[str, Any]], limit: float, dtype: str) -> None:
    """Draw a row per module call: smallest to largest magnitude of its outputs; the last is the bad one."""
    names = []
    for row, frame in enumerate(frames):
        names.append(frame["module"] or frame["type"])
        outputs = [v for v in frame["values"] if v["label"].startswith(("output", "grad")) and "abs_max" in v]
        sizes = [float(v[which]) for v in outputs for which in ("abs_min", "abs_max")] or [_FLOOR]
        finite = [max(size, _FLOOR) for size in sizes if math.isfinite(size)]
        if finite:
            axes.plot([min(finite), max(finite)], [row, row], color="0.75", linewidth=3, zorder=1)
        # A nan or inf has no place on the axis: its marker stands apart, beyond the limit.
        place = max(finite) if len(finite) == len(sizes) else limit * 10
        bad = any(v["bad"] for v in outputs)
        style = {"color": "tab:red", "marker": "X"} if bad else {"color": "tab:blue", "marker": "o"}
        axes.scatter([place], [row], zorder=2, **style)
    axes.axvline(limit, color="tab:red", linestyle="--", linewidth=1)
    axes.text(limit, -0.8, f"{dtype} limit {limit:.3g}", color="tab:red", ha="right", va="bottom", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(_FLOOR / 2, limit * 30)
    axes.set_ylim(len(names) - 0.4, -1.6)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("magnitude of the outputs (smallest to largest); X beyond the limit: nan or inf")
    axes.set_title("the failing batch, in order of the calls", fontsize=10)


def _limit(frames: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Return the largest number of the narrowest format that any output was used in, and its name."""
    values = (value for frame in frames for value in frame["values"])
    names = [value.get("used_as") or "" for value in values if not value["label"].startswith("input")]
    formats = [one for name in names if isinstance(one := getattr(torch, name, None), torch.dtype)]
    narrowest = min(formats, key=lambda one: float(torch.finfo(one).max), default=torch.float32)
    return float(torch.finfo(narrowest).max), str(narrowest).removeprefix("torch.")


# -- Collects the findings of all ranks over the side channel, prints them once and writes them to files --
# No collective is involved, so nothing here can hang.

_log = logging.getLogger(__name__)
# Ranks that replay together are at most a step apart from each other [s].
_PATIENCE = 30.0


class ReportPublisher:
    """Collects the reports of all ranks; rank 0 prints them once, in rank order, and writes them to files."""

    def __init__(self, communicator: Communicator, folder: Path, settings: OverflowSettings) -> None:
        self.communicator, self.folder, self.settings = communicator, folder, settings
        self._collections = 0
        channel = communicator.side_channel
        # No two runs share a topic.
        self._gather = Gather(channel, attempt_on(channel).topic("overflow"), timeout=settings.timeout)
        self.close = self._gather.close

    def collect(self, entry: Mapping[str, Any], *, for_all: bool = True) -> Gathered:
        """Send this rank's entry, which JSON can hold, and return those that came in time."""
        # Not ``for_all``, rank 0 alone receives them and waits; the others get back their own.
        self._collections += 1
        return self._gather.collect(self._collections, dict(entry), for_all=for_all)

    def all_arrive(self) -> bool:
        """Return whether all ranks get here in half a minute; one that is missing may wait in a collective."""
        # A late rank finds the messages of ranks that have given up since; the second round shows that.
        with replaced(self._gather, timeout=min(self.settings.timeout, _PATIENCE)):
            return not any(self.collect({}).missing for _ in range(2))

    def publish(self, report: RankReport, why: str) -> str:
        """Print and write the reports of a hit that all know of; return the error's text, the same on all."""
        own = {"head": report.head(), "origin": report.clean is False, "occasion": asdict(report.occasion)}
        gathered = self.collect(own)
        missing = {rank: f"rank {rank}: no report within {gathered.timeout:g} s" for rank in gathered.missing}
        heads = {rank: entry["head"] for rank, entry in gathered.entries.items()} | missing
        # With accumulated gradients, or several steps since the last look, ranks may name different batches: the
        # first batch of an origin counts, or the first of all if nothing was replayed.
        entries = list(gathered.entries.values())
        occasions = [e["occasion"] for e in entries if e["origin"]] or [e["occasion"] for e in entries]
        occasion = Occasion(**min(occasions, key=lambda each: each["batch_number"]))
        reports = self.collect({"text": report.text(), "json": report.as_json()}, for_all=False).entries
        stem = f"batch-{occasion.batch_number}"
        head = combined(occasion, heads, why)
        if self.communicator.is_main:
            texts = missing | {rank: entry["text"] for rank, entry in reports.items()}
            as_json = [entry["json"] for entry in reports.values()]
            self._write(stem, f"\n{combined(occasion, texts, why)}\n", as_json)
            self._draw(stem, as_json)
        # What the other ranks raise then would end rank 0 too, so they wait until it has written all this.
        if not gathered.missing:
            self.collect({})
        return f"{head}\nFull report: {self.folder / f'{stem}.txt'}"

    def publish_trace(self, occasion: Occasion, frames: Iterable[Frame]) -> None:
        """Print and write the traced frames of all ranks, in rank order; the step itself has run."""
        number, indent = occasion.batch_number, " " * 17
        where = f"rank {self.communicator.rank}, epoch {occasion.epoch}, step {occasion.step}"
        lines = [
            f"\n{indent} *** Starting batch number={number} *** ({where})",
            COLUMNS,
            *(frame.text() for frame in frames),
            f"{indent} *** Finished batch number={number} ***\n",
        ]
        entries = self.collect({"text": "\n".join(lines)}, for_all=False).entries
        if self.communicator.is_main:
            self._write(f"trace-batch-{number}", "\n".join(entry["text"] for entry in entries.values()), [])

    def _write(self, stem: str, text: str, reports: Sequence[Mapping[str, Any]]) -> None:
        """Print a report and write it as text and as JSON; say so if that is not possible."""
        say(text)
        write_report(self.folder / f"{stem}.txt", text)
        write_report(self.folder / f"{stem}.json", json.dumps({"ranks": list(reports)}, indent=1))

    def _draw(self, stem: str, reports: list[Any]) -> None:
        if self.settings.report_dir is None or not reports:
            return
        # A broken matplotlib must not make rank 0 act differently from the others.
        try:
            content = draw(reports)
        except Exception as error:
            text = "the picture of an overflow could not be drawn (it needs: pip install '.[plot]'): %s: %s"
            _log.warning(text, type(error).__name__, error)
        else:
            write_report(self.folder / f"{stem}.png", content)
