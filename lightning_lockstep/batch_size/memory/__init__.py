"""What counts as out of memory, how much there is, and how a trial is kept within it.

Everything here works without a Trainer: errors and numbers in, frozen dataclasses out.
"""

from lightning_lockstep.batch_size.memory.limits import limited_memory
from lightning_lockstep.batch_size.memory.malloc import keep_freed_memory, return_freed_memory
from lightning_lockstep.batch_size.memory.meter import (
    CPUMeter,
    MemoryMeter,
    MemoryUse,
    meter_for,
    parse_bytes,
)
from lightning_lockstep.batch_size.memory.out_of_memory import (
    Failure,
    attempt,
    is_out_of_memory,
    release_memory,
)

__all__ = [
    "CPUMeter",
    "Failure",
    "MemoryMeter",
    "MemoryUse",
    "attempt",
    "is_out_of_memory",
    "keep_freed_memory",
    "limited_memory",
    "meter_for",
    "parse_bytes",
    "release_memory",
    "return_freed_memory",
]
