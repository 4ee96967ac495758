"""Who compiles, and what they say of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lightning_lockstep._doors.torch_internals import compilation_records
from lightning_lockstep.xla.runtime import compilations_so_far

__all__ = ["Compilation", "CompilationSource", "DynamoCompilations", "XLACompilations", "sources_for"]


class Compilation(NamedTuple):
    """What was compiled once."""

    what: str  # a function of the program, or graphs of torch-xla
    seconds: float
    reason: str = ""  # in the words of the compiler; empty: it gives none, or for the first time
    graphs: int = 1


class CompilationSource(Protocol):
    """Knows what was compiled in this process."""

    def take(self) -> Sequence[Compilation]:
        """Return what was compiled since the last call."""
        ...


class DynamoCompilations:
    """What ``torch.compile`` has compiled, with the reasons that it gives; on any device."""

    def __init__(self) -> None:
        self._last = self._newest()

    def take(self) -> Sequence[Compilation]:
        """See :meth:`CompilationSource.take`; of more than torch keeps (64), the last ones."""
        records = self._records()
        new = [one for one in records if _begun(one) > self._last]
        self._last = max([self._last, *map(_begun, new)])
        # The backward of a graph has a record of its own, without the function's name.
        named = {one.compile_id: one for one in records if one.co_filename}
        parts: dict[Any, list[Any]] = {}
        for one in new:
            parts.setdefault(one.compile_id, []).append(one)
        return [_joined(named.get(compile_id), part) for compile_id, part in parts.items()]

    def _newest(self) -> int:
        return max(map(_begun, self._records()), default=0)

    @staticmethod
    def _records() -> list[Any]:
        return compilation_records()


def _joined(named: Any | None, parts: Sequence[Any]) -> Compilation:
    """Return one compilation: the records of one graph, and the one of them, perhaps an earlier one, with the name."""
    seconds = sum(float(one.duration_us or 0) for one in parts) / 1e6
    if named is None:
        return Compilation("torch.compile", seconds)
    reason = str(named.recompile_reason or "").partition(": ")[2]
    return Compilation(
        f"{Path(str(named.co_filename)).name}:{named.co_firstlineno} in {named.co_name}", seconds, reason
    )


def _begun(record: Any) -> int:
    return int(record.start_time_us or 0)


class XLACompilations:
    """What torch-xla has compiled; it counts, and does not report what or why."""

    def __init__(self) -> None:
        self._count, self._seconds = compilations_so_far()

    def take(self) -> Sequence[Compilation]:
        count, seconds = compilations_so_far()
        new, took = count - self._count, seconds - self._seconds
        self._count, self._seconds = count, seconds
        return [Compilation("torch-xla", took, graphs=new)] if new else []


def sources_for(device_type: str) -> list[CompilationSource]:
    """Return who may compile in a run."""
    return [DynamoCompilations(), *([XLACompilations()] if device_type == "xla" else [])]
