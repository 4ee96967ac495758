"""One thing that is wrong with a command line, and how several are shown."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Args:
        text: What was given, what was expected, how to mend it; one sentence or two.
        error: The exception behind it, shown only to those who ask for stack traces.
    """

    text: str
    error: BaseException | None = field(default=None, compare=False)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'this' or 'that'?"` with the nearest known names, or `""` if none is near."""
    names = list(dict.fromkeys(known))
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), list(lower), n=2, cutoff=0.6)
    if not near:
        near = [name for name in lower if given and name.startswith(given.lower())][:2]
    if not near:
        return ""
    return " Did you mean " + " or ".join(repr(lower[name]) for name in near) + "?"


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `given`, or `None` if none is near."""
    return next(iter(difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)), None)


def show_faults(
    program: str, faults: Sequence[Fault], *, stack_traces: bool, outcome: str = "nothing was started"
) -> None:
    """Print all faults as one message to standard error.

    Args:
        program: Name of the command, for the first line.
        faults: What is wrong, at least one.
        stack_traces: Print the exceptions behind the faults first.
        outcome: What came of it.
    """
    if stack_traces:
        for fault in faults:
            if fault.error is not None:
                traceback.print_exception(fault.error)
    sys.stderr.write(describe(program, faults, stack_traces=stack_traces, outcome=outcome))
    sys.stderr.flush()


def describe(
    program: str,
    faults: Sequence[Fault],
    *,
    stack_traces: bool = False,
    outcome: str = "nothing was started",
) -> str:
    """Return the message of `show_faults`."""
    count = "one fault" if len(faults) == 1 else f"{len(faults)} faults"
    lines = [f"{program}: {count} in the configuration; {outcome}.", ""]
    for number, fault in enumerate(faults, 1):
        first, *rest = fault.text.splitlines() or [""]
        lines += [f"  {number}. {first}", *(f"     {line}" for line in rest)]
    if not stack_traces and any(fault.error is not None for fault in faults):
        lines += ["", "HYDRA_FULL_ERROR=1 shows the exceptions behind this."]
    return "\n".join([*lines, ""])
