"""``python -m benchmarks <topic> [--quick]``: run a topic, print its tables, write results/<topic>.md."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

import benchmarks
from benchmarks.against import run_against
from benchmarks.engine import Report
from benchmarks.machine import facts
from tests.harness.device import DEVICE

HERE = Path(__file__).parent
#: The topics whose training runs on the device of ``--device``; the others measure the CPU and the network.
ON_DEVICE = (
    "batch_size",
    "by_sample",
    "callbacks",
    "guard",
    "overflow",
    "recovery",
    "replica_check",
    "step",
    "stragglers",
    "verify",
)


def topics() -> dict[str, str]:
    """Topic to the first line of its module's docstring, for every ``bench_<topic>.py`` in this folder."""
    found = {}
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name.startswith("bench_"):
            text = (HERE / f"{module.name}.py").read_text().lstrip('"')
            found[module.name.removeprefix("bench_")] = text.splitlines()[0].strip('"')
    return found


def show(report: Report, about: dict[str, str], console: Console) -> None:
    """Print the report."""
    console.print(f"\n[bold]{report.title}[/bold]")
    for label, text in about.items():
        console.print(f"  {label}: {text}", highlight=False)
    for table in report.tables:
        drawn = RichTable(*table.header(), title=table.title, title_justify="left")
        for row in table.rows():
            drawn.add_row(*map(escape, row))
        console.print(drawn)
    for note in report.notes:
        console.print(f"- {note}", highlight=False)


def markdown(report: Report, about: dict[str, str], command: str) -> str:
    """The report as a page that is committed beside the code."""
    lines = [f"# {report.title}", "", f"Made by `{command}`.", ""]
    lines += [f"- {label}: {text}" for label, text in about.items()]
    for table in report.tables:
        lines += ["", f"## {table.title}", "", _line(table.header()), _line(["---"] * len(table.header()))]
        lines += [_line(row) for row in table.rows()]
    if report.notes:
        lines += ["", *[f"- {note}" for note in report.notes]]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def add_to(page: Path, report: Report, about: dict[str, str], command: str) -> None:
    """Put the report behind what the page has already, its title before that of each table."""
    tables = [replace(table, title=f"{report.title}: {table.title}") for table in report.tables]
    text = markdown(replace(report, tables=tables), about, command)
    if page.exists():
        text = "\n## " + text.split("\n## ", 1)[1]
    with page.open("a") as file:
        file.write(text)


def main() -> int:
    """Run the topic named on the command line."""
    known = topics()
    listing = "\n".join(f"  {name:12} {what}" for name, what in sorted(known.items()))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="topics:\n" + listing,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    listed = ", ".join(ON_DEVICE)
    parser.add_argument(
        "topic",
        choices=sorted(known),
        metavar="topic",
        help="one of those above",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=f"for {listed} (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs; writes no file")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="compare with another checkout of this project, in turn",
    )
    parser.add_argument("--add-to", type=Path, metavar="PAGE", help="add the tables to this page")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of --against (default: 6)")
    given = parser.parse_args()
    # Written to a file or a pipe, a narrow default width would break every cell.
    console = Console(width=None if sys.stdout.isatty() else 120)
    if given.device == "cuda":
        import torch

        if given.topic not in ON_DEVICE:
            parser.error(f"--device cuda: {given.topic} trains on no device; {listed} do")
        if not torch.cuda.is_available():
            parser.error("--device cuda: there is no CUDA device here")
    os.environ[DEVICE] = given.device
    started = time.monotonic()
    if given.against is not None:
        report = run_against(given.topic, given.against.resolve(), HERE.parent, rounds=given.rounds)
    else:
        report = importlib.import_module(f"benchmarks.bench_{given.topic}").run(given.quick)
    about = facts(given.quick)
    about["took"] = f"{time.monotonic() - started:.0f} s"
    show(report, about, console)
    if given.add_to is not None:
        add_to(given.add_to, report, about, f"scripts/gpu, on {given.device}")
    if not given.quick and given.against is None and given.device == "cpu":
        target = HERE / "results" / f"{given.topic}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(markdown(report, about, f"python -m benchmarks {given.topic}"))
        console.print(f"written: {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
