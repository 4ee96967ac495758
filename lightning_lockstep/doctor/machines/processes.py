"""What the doctor uses to run programs: of :mod:`lightning_lockstep._processes`, and the last line of an output."""

from lightning_lockstep._processes import (
    NOT_FOUND,
    end_group,
    end_programs,
    memory_file,
    run_program,
    text_of,
)

__all__ = ["NOT_FOUND", "end_group", "end_programs", "last_line", "memory_file", "run_program", "text_of"]

# MPI frames its messages with such lines.
_RULE = " -*="


def last_line(text: str) -> str:
    """Return the last line of a text that is neither blank nor a rule, the empty string if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip(_RULE)]
    return lines[-1] if lines else ""
