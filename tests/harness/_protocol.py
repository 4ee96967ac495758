"""What ``ranks.py`` and the fork server say to each other. Imports neither torch nor pytest."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

#: Asks a rank for the Python stacks of all its threads. A real-time signal, so that the code under test
#: keeps SIGUSR1, SIGUSR2 and SIGTERM for itself.
STACK_SIGNAL = int(signal.SIGRTMIN) + 7 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)


@dataclasses.dataclass(frozen=True)
class Call:
    """What the ranks of one ``run_ranks`` call."""

    function: bytes
    """Pickled ``(function, args)``; only the ranks unpickle it."""
    sys_path: list[str]
    backend: str | None
    timeout: float


@dataclasses.dataclass(frozen=True)
class ScriptJob:
    """One Python program, run as ``python`` would run it."""

    arguments: list[str]
    """What stands behind ``python``: a file, ``-m module`` or ``-c code``, and the program's own arguments."""
    environment: dict[str, str]
    cwd: str
    stdout: str
    stderr: str


@dataclasses.dataclass
class RankOutcome:
    """How one rank ended."""

    rank: int
    returncode: int | None = None
    """Exit code; negative: minus the signal that killed it."""
    value: Any = None
    """What the function returned."""
    traceback: str | None = None
    """The formatted traceback, where the function raised."""
    exception: str | None = None
    """``TypeName: message`` of that exception."""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    """From the start of the job to this rank's end."""
    killed_by_helper: bool = False
    """The helper ended it: time limit, or ``linger`` after another rank's failure."""
    stack: str | None = None
    """Python stacks of all threads, taken before the helper killed the rank."""

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the process, if one did."""
        if self.returncode is None or self.returncode >= 0:
            return None
        return signal.Signals(-self.returncode)

    @property
    def ok(self) -> bool:
        """Whether the function returned and the process exited with 0."""
        return self.returncode == 0 and self.traceback is None
