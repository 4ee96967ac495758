"""The report at the end of a run: a table, and `summary.json`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_lockstep._files import write_report
from lightning_lockstep._text import counted

_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of one run."""

    metrics: dict[str, float]  # the last value of each
    steps: int  # of the optimizer
    epochs: int  # begun and ended
    ranks: int
    samples_per_second: float | None  # of all ranks in training, evaluation left out
    wall_time: float  # from the first to the last line of the run [s]
    files: dict[str, str]  # where things are, by what they are


def write(summary: Summary, folder: Path) -> None:
    """Write `summary.json` into the run folder; where that is not possible, say so."""
    metrics = {
        name: value if math.isfinite(value) else repr(value) for name, value in summary.metrics.items()
    }
    text = json.dumps({**asdict(summary), "metrics": metrics}, indent=2)
    write_report(folder / _FILE, text + "\n")


def written(folder: Path) -> tuple[int, int, int] | None:
    """Return what identifies the `summary.json` that is in the run folder now; `None` where there is none."""
    try:
        found = (folder / _FILE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_metrics(folder: Path, *, earlier: tuple[int, int, int] | None) -> dict[str, float]:
    """Return the metrics that rank 0 has written into the run folder; none where it could not."""
    if written(folder) == earlier:  # as it was before the run
        return {}
    try:
        text = (folder / _FILE).read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: float(value) for name, value in json.loads(text)["metrics"].items()}


def show(summary: Summary) -> None:
    """Print the result as a table."""
    table = Table(title="lightning-lockstep: run finished", show_header=False, title_justify="left")
    for name in sorted(summary.metrics, key=_order):
        table.add_row(name, f"{summary.metrics[name]:.4f}")
    table.add_section()
    table.add_row(
        "steps", f"{summary.steps} in {counted(summary.epochs, 'epoch')} on {counted(summary.ranks, 'rank')}"
    )
    if summary.samples_per_second is not None:
        table.add_row("samples/s", f"{summary.samples_per_second:,.0f}")
    table.add_row("wall time", f"{summary.wall_time:.1f} s")
    table.add_section()
    here = Path.cwd()
    for name, path in summary.files.items():
        shown = Path(path).relative_to(here) if Path(path).is_relative_to(here) else Path(path)
        table.add_row(name, Text(str(shown), overflow="fold"))
    Console(width=None).print(table)


def _order(name: str) -> tuple[int, str]:
    first = name.split("_", 1)[0]
    return ({"train": 0, "val": 1, "test": 2}.get(first, 3), name)
