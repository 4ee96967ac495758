"""How long to wait for what only a hang keeps from happening."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Below pytest's own limit for a test (600 s in pyproject.toml), which would end it without the stacks of its ranks [s].
_LONGEST = 540.0


def patience(seconds: float) -> float:
    """Return a time limit for this run: longer where several tests share the cores."""
    # ``LOCKSTEP_TESTS_PATIENCE`` multiplies every limit of ``run_ranks`` and ``run_script`` (default: 1, and
    # 2 in a worker of pytest-xdist).
    default = "2" if "PYTEST_XDIST_WORKER" in os.environ else "1"
    return min(seconds * float(os.environ.get("LOCKSTEP_TESTS_PATIENCE", default)), _LONGEST)


def wait_until(condition: Callable[[], object], seconds: float = 20.0, pause: float = 0.005) -> bool:
    """Wait until a condition holds; return whether it does in time."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(pause)
    return True
