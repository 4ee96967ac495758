"""A run folder as the check ``run`` reads it: its records, its checkpoints, and when they were written."""

from __future__ import annotations

import glob
import json
import math
import re
import shlex
import time
import zipfile
from pathlib import Path, PurePath
from typing import Any

from lightning_lockstep.deepspeed.checkpoints.file_names import is_state_file
from lightning_lockstep.doctor.machines.machine import Machine

__all__ = ["RunFolder"]

# What a run leaves in its folder, Hydra's own first.
_MARKS = (
    ".hydra",
    "summary.json",
    "failure.json",
    "guard-report.json",
    "batch_size.json",
    "overflow",
    "checkpoints",
    "csv/metrics.csv",
)
_STARTED = ".hydra/overrides.yaml"  # rewritten at the start of each attempt
_CHECKPOINTS = ("checkpoints/*.ckpt", "*.ckpt")
_WITHOUT_OPTIMIZER = ".consolidated.ckpt"
_UNQUOTED = re.compile(r"[\w./:@%+-]+")


class RunFolder:
    """A folder that a user has named."""

    def __init__(self, machine: Machine, given: str) -> None:
        self._machine = machine
        self.given = given  # as the user wrote it
        self._path = str(Path(given).absolute())
        self.unreadable: list[str] = []  # records that were asked for and could not be read

    @property
    def exists(self) -> bool:
        return self._machine.exists(self._path)

    @property
    def is_of_a_run(self) -> bool:
        """Whether it contains a file of a run."""
        return any(self.has(mark) for mark in _MARKS)

    def runs_below(self) -> list[RunFolder]:
        """Return the run folders in it, such as those of the jobs of a sweep."""
        below = [
            RunFolder(self._machine, str(PurePath(self.given, PurePath(p).name))) for p in self.glob("*")
        ]
        return sorted(
            (folder for folder in below if folder.is_of_a_run),
            key=lambda folder: (len(PurePath(folder.given).name), folder.given),
        )

    def has(self, name: str) -> bool:
        return self._machine.exists(f"{self._path}/{name}")

    def glob(self, *patterns: str) -> list[str]:
        """Return the names that match, relative to the folder, whatever characters its own name has."""
        found = [self._machine.glob(f"{glob.escape(self._path)}/{pattern}") for pattern in patterns]
        return [str(PurePath(path).relative_to(self._path)) for paths in found for path in paths]

    def text(self, name: str) -> str:
        """Return what a file holds, the empty string where there is none."""
        return self._machine.read_text(f"{self._path}/{name}", whole=True) or ""

    def record(self, name: str) -> dict[str, Any] | None:
        """Return a record of the run; ``None`` where there is none, or where it cannot be read (see ``unreadable``)."""
        if not self.has(name):
            return None
        try:
            found = json.loads(self.text(name))
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
        self.unreadable.append(name)
        return None

    def age(self, name: str) -> float:
        """Return how long ago a file was written to [s]; infinite where there is none."""
        try:
            return time.time() - Path(self._path, name).stat().st_mtime
        except OSError:
            return math.inf

    def is_of_earlier_attempt(self, name: str) -> bool:
        """Return whether a file was written before the attempt began that was the last one."""
        return self.has(_STARTED) and self.age(name) > self.age(_STARTED)

    def checkpoints(self) -> list[str]:
        """Return the complete checkpoints, from which a run can resume, the newest first."""
        names = [name for name in self.glob(*_CHECKPOINTS) if not name.endswith(_WITHOUT_OPTIMIZER)]
        return sorted(filter(self._is_whole, names), key=self.age)

    def _is_whole(self, name: str) -> bool:
        path = Path(self._path, name)
        if path.is_dir():  # DeepSpeed's
            return any(is_state_file(file.name) for file in path.glob("**/*.pt"))
        return zipfile.is_zipfile(path)  # torch's files are archives, with their index at the end

    def shown(self, name: str = "") -> str:
        """Return the path of a file in it, to paste into a shell."""
        return shlex.quote(str(PurePath(self.given, name)))

    def override(self, key: str, name: str) -> str:
        """Return an override that names a file in it, to paste into a shell; for Hydra too such a path has quotes."""
        path = str(PurePath(self.given, name))
        if not _UNQUOTED.fullmatch(path):
            path = '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return shlex.quote(f"{key}={path}")
