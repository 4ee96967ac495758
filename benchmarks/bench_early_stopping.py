"""How early stopping ends on each of 2 ranks that log different metrics, Lightning's callback beside ours."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.engine import Report, Table
from tests.harness import run_ranks_raw
from tests.models.stopping.fits import CASES, early_stopping_case, world_rank

# Stands for "hangs": much longer than a reduction of one number takes, much shorter than gloo's 30 minutes.
STUCK = 4.0
LIMIT = 60.0


def in_rank(case: str, stock: bool, folder: str) -> dict[str, Any]:
    """Fit on this rank; a rank that hangs in a collective says where and ends itself, the others wait for that."""
    hangs = Path(folder, "hangs")
    done = threading.Event()
    watch = threading.Thread(target=end_when_stuck, args=(threading.main_thread().ident, hangs, done))
    watch.start()
    ended = early_stopping_case(case, folder, stock)
    Path(folder, f"done{world_rank()}").touch()
    deadline = time.monotonic() + LIMIT
    while not hangs.exists() and time.monotonic() < deadline:
        if all(Path(folder, f"done{rank}").exists() for rank in range(2)):
            break
        time.sleep(0.05)
    done.set()
    watch.join()
    return ended


def end_when_stuck(thread: int, hangs: Path, done: threading.Event) -> None:
    """End this process once the main thread has been in one collective for STUCK seconds."""
    since: float | None = None
    while not done.wait(0.05):
        names = [frame.name for frame in traceback.extract_stack(sys._current_frames()[thread])]
        inside = {"barrier", "reduce", "all_reduce", "all_gather"} & set(names)
        since = (since or time.monotonic()) if inside else None
        if since is not None and time.monotonic() - since > STUCK:
            print("hangs in", next(name for name in names if name.startswith("reduce")), flush=True)
            hangs.touch()
            os._exit(3)


def told(outcome: Any) -> str:
    """How a rank ended, in a few words."""
    if outcome.value is None:
        return outcome.stdout.strip() or f"exit code {outcome.returncode}"
    ended = outcome.value
    if "error" in ended:
        return f"raises {ended['error']}"
    return f"{ended['reason']}, best {ended['best_score']:g}, waited {ended['wait_count']}"


def run(quick: bool) -> Report:
    """Run every case under both callbacks."""
    cases = list(CASES)[:1] if quick else list(CASES)
    rows = []
    for case in cases:
        for name, stock in (("EarlyStopping", True), ("SyncedEarlyStopping", False)):
            print(f"{case}: {name}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                outcomes = run_ranks_raw(2, in_rank, case, stock, folder, backend=None, timeout=2 * LIMIT)
            rows.append([case, name, *(told(outcome) for outcome in outcomes)])
    return Report(
        "Early stopping where ranks log different metrics",
        [Table("How each rank ends", ["the metric", "callback", "rank 0", "rank 1"], rows)],
        [f"A rank counts as hanging after {STUCK:g} s in one collective. Not a measurement of time."],
    )
