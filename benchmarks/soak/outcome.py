"""What came of a run, and where that differs from what must come of it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.soak.rules import Expected
from lightning_lockstep._text import SAVED
from tests.harness import Script, ScriptOutcome
from tests.harness.patience import patience

__all__ = ["MemoryWatch", "Observed", "differences", "observe"]

_SHARED_MEMORY = Path("/dev/shm")
_TAGS = re.compile(r"^(?:\[(?:rank ?)?\d+\]:? ?|\[\d+,\d+\]<std(?:out|err)>: ?)+")  # of torch, of mpirun


@dataclasses.dataclass(frozen=True)
class Observed:
    """What came of a run."""

    # how the process ended that the user started, what was printed, which processes were left
    script: ScriptOutcome
    raised: Mapping[str, str]  # by rank (or ``parent``), the type of the error that reached the program's end
    done: frozenset[str]  # the ranks (or ``parent``) that came to the end of the program
    reached: bool  # whether a rank came as far as the fault
    # from the fault to the end of the first process; of the whole run, if no rank came as far [s]
    seconds: float
    checkpoints: Mapping[str, str | None]  # by name, ``None`` or why it cannot be read
    files: tuple[str, ...]  # what was left in the folder for temporary files and in shared memory
    trouble: str = ""  # why the fault could not happen
    # by rank, the traceback of what ended its fit
    errors: Mapping[str, str] = dataclasses.field(default_factory=dict)


class MemoryWatch:
    """Notes which names in shared memory the processes of a run use; others on this host use names of their own."""

    def __init__(self, script: Script) -> None:
        self._script, self._names = script, set[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="soak-memory", daemon=True)
        self._thread.start()

    def end(self) -> list[str]:
        """End the watch, and return what is left of those names."""
        self._ended.set()
        self._thread.join()
        return sorted(str(_SHARED_MEMORY / name) for name in self._names if (_SHARED_MEMORY / name).exists())

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            for pid in (self._script.process.pid, *(process.pid for process in self._script.descendants())):
                with contextlib.suppress(OSError):
                    maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                    self._names.update(re.findall(r"/dev/shm/(\S+)$", maps, re.MULTILINE))


def observe(folder: Path, script: ScriptOutcome, started: float, memory: Sequence[str], trouble: str) -> Observed:
    """Return what came of a run."""
    notes = folder / "notes"
    raised = {file.stem: file.read_text() for file in notes.glob("*.raised")}
    done = frozenset(file.stem for file in notes.glob("*.done"))
    reached = [file.stat().st_mtime for file in (folder / "go", *notes.glob("*.at")) if file.exists()]
    seconds = started + script.seconds - max(reached, default=started)
    checkpoints = {file.name: _why_unreadable(file) for file in (folder / "checkpoints").glob("*.ckpt")}
    files = (*_left_in(folder / "tmp"), *memory)
    errors = {file.stem: file.read_text() for file in notes.glob("*.error")}
    return Observed(script, raised, done, bool(reached), seconds, checkpoints, files, trouble, errors)


def _why_unreadable(file: Path) -> str | None:
    try:
        content = torch.load(file, weights_only=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if {"state_dict", "loops", "optimizer_states"} <= set(content) else "it is not complete"


def _left_in(folder: Path) -> Iterator[str]:
    for entry in sorted(folder.rglob("*")):
        if entry.is_dir() and any(entry.iterdir()):
            continue
        yield str(entry.relative_to(folder))


def differences(expected: Expected, seen: Observed) -> list[str]:
    """Return in words what came of a run and should not have, or should have and did not."""
    script = seen.script
    found = [f"the fault could not happen: {seen.trouble}"] if seen.trouble else []
    if script.timed_out:
        return [*found, f"it did not end: killed after {script.seconds:.0f} s"]
    if script.returncode not in expected.codes:
        found.append(f"exit code {script.returncode}, expected {_either(expected.codes)}")
    if seen.reached and seen.seconds > patience(expected.seconds):
        found.append(f"it ended {seen.seconds:.0f} s after the fault, expected {expected.seconds:.0f} s at most")
    found += _program_differences(expected, seen) + _text_differences(expected, script)
    found += [f"checkpoint {name} cannot be read: {why}" for name, why in seen.checkpoints.items() if why]
    if expected.checkpoint and not any(re.search(expected.checkpoint, name) for name in seen.checkpoints):
        found.append(f"no checkpoint {expected.checkpoint!r}: there are {sorted(seen.checkpoints)}")
    found += [f"left running: {process}" for process in script.leftovers]
    may_leave = re.compile(expected.may_leave or "(?!)")
    found += [f"left behind: {name}" for name in seen.files if not may_leave.search(name)]
    return found


def _program_differences(expected: Expected, seen: Observed) -> list[str]:
    found = []
    for who, allowed in expected.raised.items():
        raised = seen.raised.get(who, "")
        if raised not in allowed:
            found.append(f"{who}: {raised or 'no error'}, expected {_either(allowed)}")
    found += [f"{who} did not come to the end of the program" for who in sorted(expected.done - seen.done)]
    if not expected.done and seen.done:
        found.append(f"{', '.join(sorted(seen.done))} came to the end of the program")
    return found


def _text_differences(expected: Expected, script: ScriptOutcome) -> list[str]:
    found = [f"not printed: {text!r}" for text in expected.printed if not re.search(text, script.output)]
    lines = _lines(script.output)
    if expected.report and expected.times:
        times = sum(bool(re.match(expected.report, line)) for line in lines)
        if not 1 <= times <= expected.times:
            found.append(f"{expected.report!r} begins {times} lines, expected {_either(range(1, expected.times + 1))}")
    # Below it stands the file in which the failure is kept.
    last = "".join([line for line in _lines(script.stderr) if not line.startswith(SAVED)][-1:])
    if expected.last and not re.match(expected.last, last):
        found.append(f"the last line is {last!r}, expected {expected.last!r}")
    if expected.silent and "Traceback" in script.output:
        found.append("a traceback is printed, expected none")
    return found


def _lines(text: str) -> list[str]:
    return [_TAGS.sub("", line) for line in text.splitlines() if _TAGS.sub("", line).strip()]


def _either(allowed: object) -> str:
    return " or ".join(str(one) or "no error" for one in allowed)  # type: ignore[attr-defined]
