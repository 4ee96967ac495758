"""What comes of a run of two ranks in which one thing goes wrong: Lightning's ddp and ours."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.engine import Report, Table
from benchmarks.terminal import PATIENCE, Shown, run_in_terminal, without_colours
from lightning_lockstep._text import SAVED

PROGRAM = Path(__file__).with_name("_failures_train.py")
FAULTS = {
    "raise": "rank 1 raises",
    "kill": "rank 1 is killed",
    "shapes": "an all-reduce of 3 values on rank 0, of 4 on rank 1",
    "never": "rank 1 waits for its data and never comes",
    "uneven": "rank 1 has 4 batches, rank 0 has 10",
    "nan": "the loss of rank 1 is nan",
    "gradients": "loss.backward() in manual optimization: no gradient is reduced",
    "data": "an iterable data set gives both ranks the same batches",
}
LIMIT = 120.0  # seconds after the fault, after which a run counts as one that hangs
LONGEST = 160  # characters of a last line


def train(
    fault: str, strategy: str, *, limit: float = LIMIT, options: tuple[str, ...] = ()
) -> tuple[Shown, float | None]:
    """Run the program on a terminal; what came of it, and when the fault happened [s since the epoch]."""
    folder = Path(tempfile.mkdtemp(prefix="failures-"))
    try:
        shutil.copy(PROGRAM, folder / "train.py")
        command = [sys.executable, "train.py", "--strategy", strategy, *options]
        noted, environment = folder / "fault", {"FAULT": fault}
        shown = run_in_terminal(command, folder=folder, limit=limit, since=noted, environment=environment)
        return shown, float(noted.read_text()) if noted.exists() else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def printed(shown: Shown) -> list[str]:
    """The lines that have any character."""
    return [text for line in shown.lines if (text := without_colours(line).strip())]


def row(fault: str, strategy: str, *, limit: float) -> list[str]:
    """One run, as a row of the table."""
    shown, at = train(fault, strategy, limit=limit)
    lines = printed(shown)
    # Below it, runs of this package name the file in which the failure is kept.
    last = next((line for line in reversed(lines) if not line.startswith(SAVED)), "")
    if shown.returncode is None:
        ended = f"still hanging after {limit:.0f} s" + ("" if shown.obeyed else f", and {PATIENCE:.0f} s after SIGTERM")
    else:
        code = shown.returncode
        ended = f"exit code {code if code >= 0 else 128 - code}"
    seconds = f"{shown.ended_at - at:.1f}" if at is not None and shown.returncode is not None else ""
    cut = last if len(last) <= LONGEST else f"{last[:LONGEST]} ..."
    return [FAULTS[fault], strategy, ended, seconds, str(len(lines)), cut.replace("|", "\\|")]


def run(quick: bool) -> Report:
    """Each fault once under both strategies."""
    rows = []
    for fault in ["raise"] if quick else FAULTS:
        for strategy in ("ddp", "lockstep_ddp"):
            print(f"{fault}: {strategy}", flush=True)
            rows.append(row(fault, strategy, limit=LIMIT))
    columns = [
        "what goes wrong",
        "strategy",
        "ended with",
        "seconds after it",
        "lines printed",
        "the last line",
    ]
    return Report(
        "What comes of a run in which one thing goes wrong, 2 ranks",
        [Table("each once, in step 5", columns, rows)],
        notes=[
            "The program is `benchmarks/_failures_train.py`, ten steps on the CPU, with all defaults of the strategy, "
            "no progress bar and no model summary. Lines without a character are not counted. With `lockstep_ddp` "
            "`OverflowDetector` is there for the nan, `ReplicaCheck` for the last two.",
            f"A run is ended {LIMIT:.0f} s after the fault. The exit code is that of a shell: 128 and the signal.",
            "A rank that waits is reported after `stall_timeout`, 60 s by default.",
        ],
    )
