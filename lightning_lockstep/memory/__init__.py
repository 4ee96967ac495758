"""What counts as out of memory, how much there is, and the search for the largest batch that fits.

Everything here works without a Trainer: errors, readings and floats in, frozen dataclasses out.
"""

from lightning_lockstep.memory.effective_batch import (
    EffectiveBatch,
    plan_effective_batch,
    scaled_learning_rate,
)
from lightning_lockstep.memory.executable import find_executable_batch_size
from lightning_lockstep.memory.heap import keep_freed_memory, return_freed_memory
from lightning_lockstep.memory.out_of_memory import Failure, attempt, is_out_of_memory, release_memory
from lightning_lockstep.memory.reading import CPUMeter, MemoryMeter, MemoryReading, meter_for, parse_bytes
from lightning_lockstep.memory.search import (
    BinarySearch,
    ModelSearch,
    PowerSearch,
    Proposal,
    SizeSearch,
    Trial,
    search_for,
)
from lightning_lockstep.memory.wall import memory_wall

__all__ = [
    "BinarySearch",
    "CPUMeter",
    "EffectiveBatch",
    "Failure",
    "MemoryMeter",
    "MemoryReading",
    "ModelSearch",
    "PowerSearch",
    "Proposal",
    "SizeSearch",
    "Trial",
    "attempt",
    "find_executable_batch_size",
    "is_out_of_memory",
    "keep_freed_memory",
    "memory_wall",
    "meter_for",
    "parse_bytes",
    "plan_effective_batch",
    "release_memory",
    "return_freed_memory",
    "scaled_learning_rate",
    "search_for",
]
