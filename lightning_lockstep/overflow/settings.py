"""The options of OverflowDetector, and what it refuses before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from torch import nn

from lightning_lockstep._lightning import Trainer
from lightning_lockstep._settings import Faults, is_whole
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.statistics import NamePatterns
from lightning_lockstep.steps.capabilities import missing_capabilities

Mode = Literal["replay", "hooks"]
Action = Literal["raise", "warn", "skip"]


@dataclass(frozen=True, kw_only=True)
class OverflowSettings:
    """The options of :class:`~lightning_lockstep.OverflowDetector`, which documents them."""

    max_frames_to_save: int = 21
    trace_batch_nums: Sequence[int] = ()
    abort_after_batch_num: int | None = None
    mode: Mode = "replay"
    action: Action = "raise"
    gradients: bool = True
    allow_inf: Sequence[str] = ()
    modules: Sequence[str] | None = None
    report_dir: str | Path | None = None
    max_skips: int = 10
    check_every_n_steps: int | None = None
    scale_floor: float = 1.0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        faults = Faults("OverflowDetector")
        faults.fields(self)
        for name in ("max_frames_to_save", "max_skips"):
            faults.whole(name, getattr(self, name))
        faults.whole("check_every_n_steps", self.check_every_n_steps, optional=True)
        last, what = self.abort_after_batch_num, "the number of a batch"
        faults.whole("abort_after_batch_num", last, least=0, what=what, optional=True)
        expected = "a list of batch numbers from 0, such as [1, 3]"
        faults.list_of("trace_batch_nums", self.trace_batch_nums, lambda n: is_whole(n) and n >= 0, expected)
        for name in ("scale_floor", "timeout"):
            faults.number(name, getattr(self, name), above=0)
        expected = "a list of name patterns, such as ['*.mask*']"
        faults.list_of("allow_inf", self.allow_inf, lambda pattern: isinstance(pattern, str), expected)
        if self.modules is not None:
            faults.list_of("modules", self.modules, lambda pattern: isinstance(pattern, str), expected)
        is_path = self.report_dir is None or isinstance(self.report_dir, (str, Path))
        faults.check(is_path, "report_dir", self.report_dir, "a folder, or None")
        if self.check_every_n_steps not in (None, 1) and self.action == "skip":
            faults.add(
                f"check_every_n_steps={self.check_every_n_steps!r} cannot be combined with action='skip': a step that"
                " was taken cannot be skipped any more. Use 1, or action='raise' or 'warn'."
            )
        faults.raise_all()

    @cached_property
    def allowed(self) -> NamePatterns:
        """Values that may be infinite."""
        return NamePatterns(self.allow_inf)

    @cached_property
    def watched(self) -> NamePatterns:
        """Modules that are looked at."""
        return NamePatterns(("*",) if self.modules is None else self.modules)


# -- What the detector cannot work with, refused before training --


def refuse_strategy(trainer: Trainer) -> None:
    """Raise if no gradients can be checked, or if they differ among ranks and no engine reports them."""
    if hasattr(trainer.strategy, "engine_gradients"):
        return
    for why in missing_capabilities(trainer.strategy, "whole_gradients", "same_weights"):
        raise ConfigurationError(
            f"OverflowDetector does not work with {type(trainer.strategy).__name__}: {why}. Use a DDP strategy without"
            " model_averaging_period, or a single device, to find the overflow."
        )


def refuse_compiled(root: nn.Module) -> None:
    """Raise if hooks would not fire because ``torch.compile`` has compiled the module or part of it."""
    marks = "_orig_mod", "_compiled_call_impl", "_compiler_ctx"  # wrapped; in place; a LightningModule
    if any(getattr(module, mark, None) is not None for module in root.modules() for mark in marks):
        raise ConfigurationError(
            "OverflowDetector(mode='hooks') was given a model compiled with torch.compile, in which hooks do not fire"
            " reliably. Use mode='replay', which replays a failing batch uncompiled."
        )
