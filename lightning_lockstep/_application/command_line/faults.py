"""One thing that is wrong with a command line, and how several are shown."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_lockstep._console import say


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    text: str  # what was given, what was expected, how to fix it
    # Shown only to those who ask for stack traces.
    error: BaseException | None = field(default=None, compare=False)


def show_faults(
    program: str, faults: Sequence[Fault], *, stack_traces: bool, outcome: str = "nothing was started"
) -> None:
    """Print all faults as one message to standard error."""
    if stack_traces:
        for fault in faults:
            if fault.error is not None:
                traceback.print_exception(fault.error)
    say(describe(program, faults, stack_traces=stack_traces, outcome=outcome))


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
