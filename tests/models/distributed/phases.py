"""What must come of a fault in one phase of a program of two ranks, decided before it runs, and one run of it."""

from __future__ import annotations

import dataclasses
import sys
from fnmatch import fnmatch
from pathlib import Path

from tests.harness import MODELS, run_script
from tests.harness.patience import patience

PROGRAM = MODELS / "distributed" / "program_phases.py"
IN_FIT = (
    *("setup", "sanity", "forward", "backward", "optimizer", "validation", "validation_end"),
    *("save", "epoch_end", "train_end", "second"),
)
OUTSIDE = ("before", "between", "after")
#: How long the grace period of the program's ranks is, and after which time a stall is one [s].
GRACE, STALL = 6.0, 2.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault, the phase in which it happens, and the rank to which it does, or ``all``."""

    phase: str
    fault: str
    target: str

    def __str__(self) -> str:
        return f"{self.fault}-{self.phase}-{self.target}"


@dataclasses.dataclass(frozen=True)
class Expected:
    code: int  # of the process that the user starts, which is rank 0; negative: of a signal
    # Patterns of the types of errors that reach the end of each rank's program; "": none.
    raised: tuple[str, str]
    printed: str = ""  # what is said of the failure
    seconds: float = 2.0  # from the fault to the end [s]
    kept: bool | None = True  # whether failure.json is there; None: it does not matter


#: The error of the rank to which a fault happens in a fit, that of the other one, the exit code, and what is printed.
_RULES = {
    "raise": ("ValueError", "RankFailedError", 1, "ValueError: boom in {phase}"),
    "kill": ("", "RankFailedError", 137, "killed by SIGKILL"),
    "exit0": ("SystemExit", "RankFailedError", 1, "SystemExit: 0"),
    "_exit0": ("", "RankFailedError", 1, "exit code 0"),
    "never": ("CollectiveStallError", "CollectiveStallError", 1, "rank {target} never came"),
    "other": ("Collective*Error", "Collective*Error", 1, ""),
    "stop": ("", "RankFailedError", 1, "stopped for longer than silence_limit"),
    "term": ("SIGTERMException", "RankFailedError", 143, "it received SIGTERM"),
    "ctrl_c": ("SystemExit", "*", 130, "interrupted at epoch"),
}
#: Phases of a fit that are not for a fault: a signal is looked at in steps and waits, Ctrl-C is one for both ranks.
_ONLY = {
    "term": ("forward", "validation", "validation_end"),
    "ctrl_c": ("forward", "validation_end", "save"),
    "stop": ("forward", "validation_end"),
    "other": ("forward", "validation_end", "train_end"),
}


def cases() -> list[Case]:
    """Return all cases that have a rule."""
    phases = (*IN_FIT, *OUTSIDE)
    every = [Case(phase, fault, who) for phase in phases for fault in _RULES for who in ("0", "1")]
    return [
        *(one for one in every if expected(one)),
        Case("forward", "exit0", "all"),
        Case("between", "exit0", "all"),
    ]


def expected(case: Case) -> Expected | None:
    """Return what must come of a case, or ``None`` if nothing is promised."""
    phase, fault, target = case.phase, case.fault, case.target
    if target == "all":
        return Expected(0, ("SystemExit", "SystemExit"), kept=False)
    own, other, code, printed = _RULES[fault]
    is_first = target == "0"
    if phase in OUTSIDE:
        return _outside(case)
    if phase not in _ONLY.get(fault, IN_FIT) or (fault == "stop" and is_first):  # nobody can end a first process
        return None
    seconds = 2.0
    if fault in ("never", "other"):
        seconds = STALL + 2.0
    if fault == "stop":  # that rank is ended by force, at the end of the grace period
        seconds = GRACE + 6.0
    if fault == "kill" and is_first:
        return Expected(-9, ("", other), "its process has ended")
    if fault == "_exit0" and is_first:
        return Expected(0, ("", other), "its process has ended")
    if fault == "ctrl_c":  # Lightning of the first process kills the other one
        own, other = ("SystemExit", "*") if is_first else ("*", "SystemExit")
    printed = printed.format(phase=phase, target=target)
    return Expected(code, (own, other) if is_first else (other, own), printed, seconds)


def _outside(case: Case) -> Expected | None:
    """Return what must come of a fault outside fits, in which nobody is ended for it but who waits for that rank."""
    phase, fault, first = case.phase, case.fault, case.target == "0"
    own, _, code, _ = _RULES[fault]
    if fault == "other" and phase == "after" and first:  # the other one ends, and its connections with it
        return Expected(1, ("RuntimeError", ""), kept=None)
    if fault not in ("raise", "kill", "exit0", "_exit0", "never"):
        return None
    if phase == "after":  # the end of a process is waited for
        code = 0 if fault in ("exit0", "_exit0") else -9 if first and fault == "kill" else code
        raised = (own, "") if first else ("", own)
        kept = None if first else fault in ("raise", "kill")
        return None if fault == "never" else Expected(code, raised, kept=kept)
    if phase == "before":
        if first or fault in ("never", "exit0", "_exit0"):
            return None
        return Expected(code, ("", own), "ended before all ranks had met", seconds=20.0, kept=False)
    if fault == "never":
        seconds = STALL + GRACE + 2.0
        return Expected(1, ("CollectiveStallError", ""), "rank 1 never came", seconds) if not first else None
    if first:
        return Expected(1, (own, "RankFailedError"), kept=None) if fault in ("raise", "exit0") else None
    said = "its program has ended" if fault == "exit0" else ""
    return Expected(code, ("RankFailedError", own), said, seconds=3.0)


def differences(case: Case, folder: Path) -> list[str]:
    """Run a case in a folder, and return what comes of it and must not, or must and does not."""
    wanted = expected(case)
    assert wanted is not None
    outcome = run_script(
        [sys.executable, str(PROGRAM), str(folder), *dataclasses.astuple(case)], cwd=folder, timeout=60
    )
    began = max((float(one.read_text()) for one in folder.glob("*.fault")), default=0.0)
    ended = max(one.stat().st_mtime for one in [*folder.glob("*.raised"), *folder.glob("*.fault")])
    raised = tuple(
        (folder / f"{rank}.raised").read_text() if (folder / f"{rank}.raised").exists() else "" for rank in "01"
    )
    found = [f"left running: {one}" for one in outcome.leftovers]
    if outcome.timed_out:
        found.append("it did not end")
    if outcome.returncode != wanted.code:
        found.append(f"exit code {outcome.returncode}, expected {wanted.code}")
    if not all(fnmatch(seen, wish) for seen, wish in zip(raised, wanted.raised, strict=True)):
        found.append(f"raised {raised}, expected {wanted.raised}")
    if wanted.printed not in outcome.output:
        found.append(f"not printed: {wanted.printed!r}")
    if wanted.kept is not None and (folder / "failure.json").exists() != wanted.kept:
        found.append("failure.json is " + ("not there" if wanted.kept else "there"))
    if ended - began > patience(wanted.seconds) * 3:  # several tests share the cores
        found.append(f"the last rank raised {ended - began:.1f} s after the fault, expected {wanted.seconds:.0f} s")
    return [*found, outcome.output] if found else []
