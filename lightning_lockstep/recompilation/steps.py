"""Which steps have compiled: the first ones of each kind, as is expected, and those that came after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_utilities import apply_to_collection
from torch import Tensor

from lightning_lockstep._text import listed
from lightning_lockstep.recompilation.advice import Shapes, advice_on_shapes
from lightning_lockstep.recompilation.sources import Compilation

__all__ = ["CompiledStep", "StepCompilations", "shapes_of"]


def shapes_of(batch: Any) -> Shapes:
    """Return the shapes of the tensors of a batch of any structure, in its order."""
    found: list[tuple[int, ...]] = []
    apply_to_collection(batch, Tensor, lambda tensor: found.append(tuple(tensor.shape)))
    return tuple(found)


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
        text = f"{where} compiled {_counted(self.count)} in {self.seconds:.1f} s"
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
    return f"{_counted(graphs)} compiled in {sum(one.seconds for one in found):.1f} s"


def _counted(graphs: int) -> str:
    return f"{graphs} graph" if graphs == 1 else f"{graphs} graphs"


def _text(shapes: Shapes) -> str:
    return ", ".join(str(shape) for shape in shapes) or "none"
