"""Which steps compiled, what changed their shapes, and which option would have saved it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_lockstep._text import counted, listed
from lightning_lockstep.batch_size.split_step import tensors_in
from lightning_lockstep.xla.runtime import compilations_so_far

# -- Which option would have saved a compilation --

Shapes = tuple[tuple[int, ...], ...]


def advice_on_shapes(stage: str, shapes: Shapes, before: Shapes) -> str:
    """Return what gives a batch the shapes of the one before, as a sentence to add; empty: not known."""
    differing = _differing_dimensions(shapes, before)
    advice = []
    if 0 in differing:
        advice.append(_on_samples(stage, smaller=shapes[0][:1] < before[0][:1]))
    if differing - {0} and stage != "predict":
        advice.append("StaticShapes(sequence_lengths=[...]) pads sequences to a few lengths")
    found = "; ".join(filter(None, advice))
    return f". {found[0].upper()}{found[1:]}" if found else ""


def _on_samples(stage: str, *, smaller: bool) -> str:
    if stage == "predict":
        return "a number of samples that the batch size divides saves that"
    if not smaller:
        return "the same number of samples in every batch saves that"
    if stage == "training":
        return "StaticShapes(last_batch='drop') leaves such a batch out, last_batch='pad' fills it up"
    return "StaticShapes(evaluation_last_batch='pad') fills such a batch up"


def _differing_dimensions(shapes: Shapes, before: Shapes) -> set[int]:
    """Dimensions in which tensors differ; none where their number or kind is another."""
    if list(map(len, shapes)) != list(map(len, before)):
        return set()
    pairs = [
        pair
        for now, then in zip(shapes, before, strict=True)
        for pair in enumerate(zip(now, then, strict=True))
    ]
    return {dimension for dimension, (now, then) in pairs if now != then}


# -- Who compiles, and what they say of it --


class Compilation(NamedTuple):
    """What was compiled once."""

    what: str  # a function of the program, or graphs of torch-xla
    seconds: float
    reason: str = ""  # in the words of the compiler; empty: it gives none, or for the first time
    graphs: int = 1


def _records() -> list[Any]:
    """Return torch's records of its last compilations; none before torch.compile is used."""
    # Nothing public tells what was compiled, when, for how long and why again.
    utils = sys.modules.get("torch._dynamo.utils")
    return [] if utils is None else list(utils.get_compilation_metrics())


class DynamoCompilations:
    """What ``torch.compile`` has compiled, with the reasons that it gives; on any device."""

    def __init__(self) -> None:
        self._last = max(map(_begun, _records()), default=0)

    def take(self) -> Sequence[Compilation]:
        """Return what was compiled since the last call; of more than torch keeps (64), the last ones."""
        records = _records()
        new = [one for one in records if _begun(one) > self._last]
        self._last = max([self._last, *map(_begun, new)])
        # The backward of a graph has a separate record, without the function's name.
        named = {one.compile_id: one for one in records if one.co_filename}
        parts: dict[Any, list[Any]] = {}
        for one in new:
            parts.setdefault(one.compile_id, []).append(one)
        return [_joined(named.get(compile_id), part) for compile_id, part in parts.items()]


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
        """Return what was compiled since the last call."""
        count, seconds = compilations_so_far()
        new, took = count - self._count, seconds - self._seconds
        self._count, self._seconds = count, seconds
        return [Compilation("torch-xla", took, graphs=new)] if new else []


# -- Which steps have compiled: the first ones of each kind, as is expected, and those that came after --


def shapes_of(batch: Any) -> Shapes:
    """Return the shapes of the tensors of a batch of any structure, in its order."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(batch))


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """One batch in which something was compiled."""

    stage: str
    batch_idx: int  # of the loader, from 0
    step: int  # optimizer steps made so far, with its own
    shapes: Shapes  # of the tensors of its batch
    before: Shapes  # of the stage's batch before it; empty: it was the first
    are_new: bool  # no batch of the stage had these shapes before
    is_expected: bool  # it is among the first batches of its stage
    compilations: tuple[Compilation, ...]

    @property
    def count(self) -> int:
        """How many graphs were compiled."""
        return sum(one.graphs for one in self.compilations)

    @property
    def seconds(self) -> float:
        """How long that took [s]."""
        return sum(one.seconds for one in self.compilations)

    def line(self) -> str:
        """Return what is said of it."""
        where = f"{self.stage} batch {self.batch_idx} (step {self.step})"
        text = f"{where} compiled {counted(self.count, 'graph')} in {self.seconds:.1f} s"
        if self.is_expected:
            return f"{text}, as the first batches do"
        if self.are_new:
            new = (
                f"{text}: its shapes {_text(self.shapes)} are new, the batch before had {_text(self.before)}"
            )
            return f"{new}{advice_on_shapes(self.stage, self.shapes, self.before)}"
        reasons = [f"{one.what}: {one.reason}" for one in self.compilations if one.reason]
        return f"{text}, with shapes that were seen before; {'; '.join(reasons) or 'the compiler does not say why'}"


@dataclass
class StepCompilations:
    """Attributes what was compiled to steps."""

    expected: int  # batches of each stage that are expected to compile
    steps: list[CompiledStep] = field(default_factory=list)  # those that have compiled
    outside: list[Compilation] = field(default_factory=list)  # before, between and after batches
    _seen: dict[str, dict[Shapes, None]] = field(default_factory=dict)  # the newest stand last
    _first: dict[str, Shapes] = field(default_factory=dict)
    _count: Counter[str] = field(default_factory=Counter)

    def batch_done(
        self,
        stage: str,
        batch_idx: int,
        step: int,
        shapes: Shapes,
        compilations: Sequence[Compilation],
        *,
        accumulated: int = 1,  # batches per optimizer step, and per expected one
    ) -> CompiledStep | None:
        """Note a batch; return it if something was compiled in it."""
        seen = self._seen.setdefault(stage, {})
        self._first.setdefault(stage, shapes)
        self._count[stage] += 1
        found = None
        if compilations:
            found = CompiledStep(
                stage=stage,
                batch_idx=batch_idx,
                step=step,
                shapes=shapes,
                before=next(reversed(seen), ()),
                are_new=shapes not in seen,
                is_expected=self._count[stage] <= self.expected * accumulated,
                compilations=tuple(compilations),
            )
            self.steps.append(found)
        seen.pop(shapes, None)
        seen[shapes] = None
        return found

    def first_shapes(self, stage: str) -> Shapes:
        """Return the shapes of the first batch of a stage; empty before it."""
        return self._first.get(stage, ())

    def summary(self) -> str:
        """Return one line on the whole run."""
        first = [one for one in self.steps if one.is_expected]
        later = [one for one in self.steps if not one.is_expected]
        text = f"{_graphs(first)} in the first batches"
        outside = f", {_graphs(self.outside)} outside of batches" if self.outside else ""
        if not later:
            return f"{text}, none later{outside}"
        where = Counter(f"{one.stage} batch {one.batch_idx}" for one in later)
        places = [f"{place} ({times} times)" if times > 1 else place for place, times in where.most_common()]
        return f"{text}, {_graphs(later)} later: {listed(places, 5)}{outside}"


def _graphs(found: Sequence[CompiledStep | Compilation]) -> str:
    graphs = sum(one.count if isinstance(one, CompiledStep) else one.graphs for one in found)
    return f"{counted(graphs, 'graph')} compiled in {sum(one.seconds for one in found):.1f} s"


def _text(shapes: Shapes) -> str:
    return ", ".join(str(shape) for shape in shapes) or "none"
