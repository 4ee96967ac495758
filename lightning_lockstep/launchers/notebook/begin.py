"""What a process does first that was just forked from the kernel of a notebook to be a rank."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from lightning_lockstep.launchers.notebook.output import write_into
from lightning_lockstep.launchers.notebook.this_rank import become_rank

__all__ = ["begin_rank"]

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_VICTIM = "500"


def begin_rank(rank: int, folder: Path) -> None:
    """Leave to the kernel what is the kernel's: its signals, its connection with the notebook, its life."""
    signal.set_wakeup_fd(-1)  # what signals write there goes to the kernel's event loop
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    become_rank(rank)
    write_into(folder, rank)
    with suppress(OSError):  # should memory run out, the operating system is to end this rank, not the kernel
        _OOM_SCORE.write_text(_VICTIM)
