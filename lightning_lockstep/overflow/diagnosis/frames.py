"""Frames: statistics of what went into and came out of a module; and the producer of the first bad value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_lockstep.numerics.statistics import TensorStatistics

__all__ = ["Frame", "Producer", "Value"]

_INDENT = " " * 17


@dataclass(frozen=True)
class Value:
    """One line of a frame."""

    label: str  # ``weight``, ``input[0]``, ``output['logits']`` ...
    statistics: TensorStatistics | None = None  # None: not a tensor, or one without values
    kind: str = ""  # printed in place of statistics
    allowed: bool = False  # whether it may hold infinities

    @property
    def bad(self) -> bool:
        """Whether it holds a nan, or an infinity that is not allowed."""
        if self.statistics is None:
            return False
        return self.statistics.nan > 0 or (self.statistics.inf > 0 and not self.allowed)

    def line(self) -> str:
        """Return the line as printed: smallest and largest magnitude, label, remarks."""
        if self.statistics is None:
            return f"{self.kind:>17} {self.label}"
        figures = f"{self.statistics.abs_min:8.2e} {self.statistics.abs_max:8.2e} {self.label}"
        remarks = self.statistics.remarks()
        return f"{figures:<44}  # {remarks}" if remarks else figures


@dataclass
class Frame:
    """One call of one module."""

    module: str  # name below the LightningModule
    type: str  # name of its class
    values: list[Value] = field(default_factory=list)  # weights, inputs and outputs, or gradients

    @property
    def bad(self) -> bool:
        return any(value.bad for value in self.values)

    def text(self) -> str:
        """Return the frame as printed."""
        return "\n".join([f"{_INDENT} {self.module} {self.type}", *(value.line() for value in self.values)])


@dataclass(frozen=True)
class Producer:
    """What produced the first bad value."""

    # module: good inputs, bad output; code: made in its own forward, just before it called `before`;
    # weight: was bad already; batch: came with the data; spot: found by detect_overflow;
    # backward: its backward was given good gradients.
    kind: Literal["module", "code", "weight", "batch", "spot", "backward"]
    module: str  # name; empty: the LightningModule itself
    type: str
    labels: tuple[str, ...] = ()  # of the bad values
    remarks: str = ""  # on the statistics of the first of them
    before: str = ""  # for code: the module called next
    low_precision: bool = False  # it computed in float16 or bfloat16

    def sentence(self) -> str:
        name = f"{self.module or 'the LightningModule'} ({self.type})"
        what = ", ".join(self.labels[:4]) + (f" [{self.remarks}]" if self.remarks else "")
        if self.kind == "code":
            return f"{name} made it in its own forward, before it called {self.before}: {what}"
        if self.kind == "weight":
            return f"the weights of {name} are bad already: {what}"
        if self.kind == "batch":
            return f"it came with the batch: {what}"
        if self.kind == "spot":
            return f"{name} made it, at detect_overflow: {what}"
        if self.kind == "backward":
            return f"the backward of {name} made it from good gradients: {what}"
        return f"{name} made it from good inputs: {what}"
