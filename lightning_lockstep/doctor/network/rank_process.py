"""The process in which a rank tests a backend: asked for one step at a time, each with a deadline."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_lockstep._text import exit_in_words
from lightning_lockstep.doctor import probes

__all__ = ["RankProcess"]

_TAIL = 1_500  # of what it prints [characters]
_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


class RankProcess:
    """A probe that answers to steps."""

    def __init__(self, program: str, arguments: list[str], environ: Mapping[str, str]) -> None:
        # environ: beside the variables of this process
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when a step fails
        command = [sys.executable, "-u", str(Path(str(probes.__path__[0]), program)), *arguments]
        if sys.platform == "linux":  # Linux kills it when this process ends
            command = [sys.executable, "-I", "-S", "-c", _WITH_PARENT, *command]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # MPICH's mpiexec and Slurm's PMI-2 exchange messages with a rank over a descriptor that it inherits.
            close_fds=False,
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="doctor-rank", daemon=True).start()

    def step(self, name: str, within: float, given: Mapping[str, Any]) -> dict[str, Any]:
        """Have it take a step; return its answer, or how it did not answer.

        Where ``ok`` is false there is an ``error`` too, and ``late`` (not within that time [s]) or ``ended`` (exit
        code).
        """
        began = time.monotonic()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps({"step": name, **given}).encode() + b"\n")
            self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=within)
        except queue.Empty:
            return {"ok": False, "late": True, "error": f"no answer within {within:.0f} s", **self._printed()}
        if answer is None:
            code = self._process.wait()
            return {
                "ok": False,
                "ended": code,
                "error": f"its process ended: {exit_in_words(code)}",
                **self._printed(),
            }
        seconds = round(time.monotonic() - began, 6)
        return {**answer, "seconds": seconds, **({} if answer.get("ok") else self._printed())}

    def end(self) -> None:
        """End it, whatever it does."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._errors):
            with suppress(OSError):
                if stream is not None:
                    stream.close()

    def leave(self, patience: float) -> None:  # patience: [s]
        """Let it end by itself, as ranks of MPI must; end it when the time is over."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self.end()

    def _printed(self) -> dict[str, str]:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        return {"printed": text[-_TAIL:]}

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError), self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        self._answers.put(answer)
        self._answers.put(None)
