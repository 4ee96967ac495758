"""What people see of a search: a line a trial, a table, a picture, and the file a resumed run reads."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_lockstep._files import write_report
from lightning_lockstep._tables import plain_table
from lightning_lockstep._text import counted, ranks_in_words, size_in_words
from lightning_lockstep.batch_size.search import ModelSearch, SizeSearch, Trial
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import MissingExtraError

__all__ = [
    "SearchResult",
    "draw",
    "keep_result",
    "known_size",
    "read_result",
    "table",
    "trial_line",
]

FILE = "batch_size.json"
PICTURE = "batch_size.png"


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    size: int  # that the run uses [samples per rank and micro-batch]
    largest: int  # that fitted in a trial, before the margin
    accumulate: int  # micro-batches per optimizer step
    ranks: int
    mode: str
    trials: Sequence[Trial]
    seconds: float  # that the search took
    reason: str  # why it ended there
    limit_source: str  # of the memory limit
    fingerprint: Mapping[str, Any]  # what the answer depends on
    tight: bool = False  # as in Found

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return self.size * self.accumulate * self.ranks


def trial_line(number: int, trial: Trial, reasons: Mapping[int, str]) -> str:
    line = f"batch size trial {number}: {trial.size:>6} per rank, "
    if trial.peak is not None:
        line += f"peak {size_in_words(trial.peak)} of {size_in_words(trial.limit)}, "
    if trial.fits:
        return line + "fits"
    first = next(iter(reasons.values()), "")
    return line + f"out of memory on {ranks_in_words(reasons)} ({first[:90]})"


def table(result: SearchResult) -> str:
    """Return the closing table of a search."""
    rows = [
        (
            each.size,
            size_in_words(each.peak),
            size_in_words(each.limit),
            "fits" if each.fits else "out of memory",
        )
        for each in sorted(result.trials, key=lambda each: each.size)
    ]
    trials = plain_table(("size", "peak", "limit", "verdict"), rows)
    numbers = f"{result.size} per rank x {result.accumulate} accumulated x {counted(result.ranks, 'rank')}"
    head = f"AutoBatchSize ({result.mode}): {len(result.trials)} trials in {result.seconds:.1f} s, {result.reason}"
    return "\n".join([head, trials, f"  batch size {numbers} = {result.global_batch} per optimizer step"])


def keep_result(folder: str | Path, result: SearchResult, search: SizeSearch | None = None) -> None:
    """Write the file and, given a search, a picture; where one cannot be written, print why and go on."""
    content = asdict(result)
    content["fingerprint"] = dict(result.fingerprint)
    write_report(Path(folder, FILE), json.dumps(content, indent=2) + "\n")
    if search is not None:
        write_report(Path(folder, PICTURE), draw(search, result.size))


def read_result(folder: str | Path) -> dict[str, Any]:
    """Return what :func:`keep_result` wrote in an earlier run; empty where there is nothing to read."""
    try:
        content = json.loads((Path(folder) / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("size"), int) else {}


def known_size(
    found: Mapping[str, Any], folder: str | Path, fingerprint: Mapping[str, Any], communicator: Communicator
) -> tuple[int, bool] | None:
    """Return (size, tight) that an earlier search found under the same conditions, by checkpoint or file."""
    known = None
    if communicator.is_main:
        for earlier in (found, read_result(folder)):
            if known is None and earlier.get("fingerprint") == dict(fingerprint):
                known = int(earlier["size"]), bool(earlier.get("tight"))
    answer: tuple[int, bool] | None = communicator.broadcast(known)
    return answer


def draw(search: SizeSearch, chosen: int) -> bytes:
    """Return a PNG of peak memory over batch size, with the limit and the choice."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        needed = "the picture of memory over batch size"
        raise MissingExtraError("matplotlib", extra="plot", needed_for=needed) from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    scale, unit = _scale(search)
    fits = [t for t in search.trials if t.fits and t.peak is not None]
    failed = [t for t in search.trials if not t.fits]
    limits = [t.limit for t in search.trials if t.limit is not None]
    axes.plot(
        [t.size for t in fits], [t.peak / scale for t in fits if t.peak], "o", color="tab:blue", label="fits"
    )
    if failed:
        heights = [(t.limit or 0.0) / scale for t in failed]
        axes.plot([t.size for t in failed], heights, "x", color="tab:red", ms=9, mew=2, label="out of memory")
    if limits:
        axes.axhline(
            limits[-1] / scale, color="tab:red", ls="--", lw=1, label=f"limit {size_in_words(limits[-1])}"
        )
    line = search.line() if isinstance(search, ModelSearch) else None
    if line is not None:
        right = max(t.size for t in search.trials)
        ends = [0.0, 1.03 * right]
        label = f"{size_in_words(line[0])} + {line[1] / 2**20:.3g} MiB a sample"
        axes.plot(ends, [(line[0] + line[1] * x) / scale for x in ends], color="tab:blue", lw=1, label=label)
    axes.axvline(chosen, color="tab:green", lw=1.5, label=f"chosen: {chosen}")
    axes.set(
        title=f"Batch size {chosen} (largest that fitted: {search.low})",
        xlabel="batch size per rank [samples]",
        ylabel=f"peak memory [{unit}]",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def _scale(search: SizeSearch) -> tuple[float, str]:
    largest = max((t.peak or t.limit or 0.0 for t in search.trials), default=0.0)
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
