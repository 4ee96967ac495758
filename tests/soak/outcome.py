"""What came of a run, and where that differs from what must come of it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tests.helpers import ScriptOutcome
from tests.soak.rules import Expected

__all__ = ["Observed", "differences", "observe", "shared_memory"]

_SHARED_MEMORY = Path("/dev/shm")
_TAG = re.compile(r"^\[(?:rank ?|\d+,)?(\d+)\](?:<\w+>)?:? ?")


@dataclasses.dataclass(frozen=True)
class Observed:
    """What came of a run.

    Attributes:
        script: How the process ended that the user started, what was printed, which processes were left.
        raised: By rank (or ``parent``), the type of the error that reached the program's end.
        done: The ranks (or ``parent``) that came to the end of the program.
        seconds: From the fault to the end of the first process [s].
        checkpoints: By name, ``None`` or why it cannot be read.
        files: What was left in the folder for temporary files and in shared memory.
        trouble: Why the fault could not happen.
    """

    script: ScriptOutcome
    raised: Mapping[str, str]
    done: frozenset[str]
    seconds: float
    checkpoints: Mapping[str, str | None]
    files: tuple[str, ...]
    trouble: str = ""


def shared_memory() -> frozenset[str]:
    """Return the names in shared memory."""
    with contextlib.suppress(OSError):
        return frozenset(entry.name for entry in _SHARED_MEMORY.iterdir())
    return frozenset()


def observe(
    folder: Path, script: ScriptOutcome, started: float, memory_before: frozenset[str], trouble: str
) -> Observed:
    """Return what came of a run.

    Args:
        folder: Its folder.
        script: How it ended.
        started: When, in seconds since the epoch.
        memory_before: Names in shared memory before it.
        trouble: Why the fault could not happen, if so.
    """
    notes = folder / "notes"
    raised = {file.stem: file.read_text() for file in notes.glob("*.raised")}
    done = frozenset(file.stem for file in notes.glob("*.done"))
    reached = [file.stat().st_mtime for file in (folder / "go", *notes.glob("*.at")) if file.exists()]
    seconds = started + script.seconds - max(reached) if reached else script.seconds
    checkpoints = {file.name: _why_unreadable(file) for file in (folder / "checkpoints").glob("*.ckpt")}
    files = (*_left_in(folder / "tmp"), *_left_in_memory(memory_before))
    return Observed(script, raised, done, seconds, checkpoints, files, trouble)


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


def _left_in_memory(before: frozenset[str]) -> list[str]:
    """Return what is new in shared memory and used by no process; of another run it is in use, or soon gone."""
    deadline = time.monotonic() + 2.0
    while new := shared_memory() - before - _mapped():
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return [f"/dev/shm/{name}" for name in sorted(new)]


def _mapped() -> frozenset[str]:
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found.update(re.findall(r"/dev/shm/(\S+)", maps.read_text(errors="replace")))
    return frozenset(found)


def differences(expected: Expected, seen: Observed) -> list[str]:
    """Return in words what came of a run and should not have, or should have and did not."""
    script = seen.script
    found = [f"the fault could not happen: {seen.trouble}"] if seen.trouble else []
    if script.timed_out:
        return [*found, f"it did not end: killed after {script.seconds:.0f} s"]
    if script.returncode not in expected.codes:
        found.append(f"exit code {script.returncode}, expected {_either(expected.codes)}")
    if not seen.trouble and seen.seconds > expected.seconds:
        found.append(
            f"it ended {seen.seconds:.0f} s after the fault, expected {expected.seconds:.0f} s at most"
        )
    found += _program_differences(expected, seen) + _text_differences(expected, script)
    found += [f"checkpoint {name} cannot be read: {why}" for name, why in seen.checkpoints.items() if why]
    if expected.checkpoint and not any(re.search(expected.checkpoint, name) for name in seen.checkpoints):
        found.append(f"no checkpoint {expected.checkpoint!r}: there are {sorted(seen.checkpoints)}")
    found += [f"left running: {process}" for process in script.leftovers]
    found += [f"left behind: {name}" for name in seen.files]
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
    lines = [_TAG.sub("", line) for line in script.output.splitlines() if line.strip()]
    if expected.report and expected.times:
        times = sum(bool(re.match(expected.report, line)) for line in lines)
        if not 1 <= times <= expected.times:
            found.append(
                f"{expected.report!r} begins {times} lines, expected {_either(range(1, expected.times + 1))}"
            )
    last = [line for line in script.stderr.splitlines() if line.strip()][-1:]
    if expected.last and not re.search(expected.last, "".join(last)):
        found.append(f"the last line is {''.join(last)!r}, expected {expected.last!r}")
    if expected.silent and "Traceback" in script.output:
        found.append("a traceback is printed, expected none")
    return found


def _either(allowed: object) -> str:
    return " or ".join(str(one) or "no error" for one in allowed)  # type: ignore[attr-defined]
