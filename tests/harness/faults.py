"""A fault that a test provokes inside a rank started by ``run_ranks``."""

from __future__ import annotations

import os
import signal


def kill_self() -> None:
    """Kill this process: a rank that dies without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
