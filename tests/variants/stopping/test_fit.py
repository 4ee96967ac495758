"""Breakpoints and signals on other numbers of ranks than two, with other signals and loaders."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.common.stopping.fits import (
    breakpoints,
    check_breakpoints,
    check_preempted,
    preempted_then_resumed,
)
from tests.helpers import run_ranks


def test_a_breakpoint_takes_four_ranks_out_after_the_same_batch(tmp_path: Path) -> None:
    check_breakpoints(run_ranks(4, breakpoints, str(tmp_path), backend=None, timeout=120))


def signals(folder: str) -> list[dict[str, Any]]:
    return [
        preempted_then_resumed(folder, signal.SIGUSR1, {}),
        preempted_then_resumed(folder, signal.SIGTERM, {"num_workers": 1}),
    ]


def test_a_signal_to_a_single_process_saves_and_resumes_at_the_next_batch(tmp_path: Path) -> None:
    ((of_user, of_term),) = run_ranks(1, signals, str(tmp_path), backend=None, timeout=120)
    check_preempted([of_user], signal.SIGUSR1)
    check_preempted([of_term], signal.SIGTERM)
