"""The settings of AutoBatchSize, checked together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_lockstep._settings import Faults
from lightning_lockstep.batch_size.memory.meter import parse_bytes
from lightning_lockstep.errors import ConfigurationError

__all__ = ["AutoBatchSizeSettings"]


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
        faults = Faults()
        faults.choice("mode", self.mode, ("model", "binsearch", "power", "off"))
        faults.number("margin", self.margin, what="a share of the size found", least=0, below=1)
        faults.choice("limit", self.limit, ("shard", None))
        faults.choice("on_oom", self.on_oom, ("raise", "split", "skip"))
        faults.choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        faults.check(
            bool(self.batch_arg_name), "batch_arg_name", self.batch_arg_name, "the name of an attribute"
        )
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val"):
            faults.whole(name, getattr(self, name))
        faults.whole("effective_batch_size", self.effective_batch_size, optional=True)
        if self.memory_limit is not None:
            try:
                parse_bytes(self.memory_limit)
            except ConfigurationError as error:
                faults.texts += error.faults
        faults.raise_all()
