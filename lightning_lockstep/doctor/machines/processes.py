"""What the doctor uses of :mod:`lightning_lockstep._processes`."""

from lightning_lockstep._processes import (
    NOT_FOUND,
    end_group,
    end_programs,
    memory_file,
    run_program,
    text_of,
)

__all__ = ["NOT_FOUND", "end_group", "end_programs", "memory_file", "run_program", "text_of"]
