"""The settings of AutoBatchSize, checked together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_lockstep.batch_size.memory.meter import parse_bytes
from lightning_lockstep.errors import ConfigurationError

__all__ = ["AutoBatchSizeSettings"]

_MODES = ("model", "binsearch", "power", "off")


@dataclass(frozen=True, kw_only=True)
class AutoBatchSizeSettings:
    """The arguments of :class:`AutoBatchSize`, checked; see there."""

    mode: Literal["model", "binsearch", "power", "off"] = "model"
    steps_per_trial: int = 2
    init_val: int = 2
    max_trials: int = 25
    batch_arg_name: str = "batch_size"
    margin: float = 0.05
    max_val: int = 8192
    memory_limit: str | int | float | None = None
    limit: Literal["shard"] | None = "shard"
    effective_batch_size: int | None = None
    on_oom: Literal["raise", "split", "skip"] = "raise"
    loss_reduction: Literal["mean", "sum"] = "mean"
    reuse: bool = True
    plot: bool = False

    def __post_init__(self) -> None:
        faults = [text for wrong, text in self._checks() if wrong]
        if self.memory_limit is not None:
            try:
                parse_bytes(self.memory_limit)
            except ConfigurationError as error:
                faults += error.faults
        if faults:
            raise ConfigurationError(faults)

    def _checks(self) -> list[tuple[bool, str]]:
        checks = [
            (self.mode not in _MODES, f"mode={self.mode!r} must be one of {', '.join(_MODES)}."),
            (
                not (isinstance(self.margin, (int, float)) and 0 <= self.margin < 1),
                f"margin={self.margin!r} must be a share from 0 to below 1 of the size found.",
            ),
            (self.limit not in ("shard", None), f"limit={self.limit!r} must be 'shard' or None."),
            (
                self.on_oom not in ("raise", "split", "skip"),
                f"on_oom={self.on_oom!r} must be 'raise', 'split' or 'skip'.",
            ),
            (
                self.loss_reduction not in ("mean", "sum"),
                f"loss_reduction={self.loss_reduction!r} must be 'mean' or 'sum', as the training step's loss is.",
            ),
            (not self.batch_arg_name, "batch_arg_name must name an attribute."),
        ]
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val", "effective_batch_size"):
            value = getattr(self, name)
            optional = name == "effective_batch_size" and value is None
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            checks.append((not optional and not whole, f"{name}={value!r} must be a whole number from 1."))
        return checks
