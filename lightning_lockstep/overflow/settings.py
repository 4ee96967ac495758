"""What an OverflowDetector was asked to do, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_lockstep.errors import ConfigurationError

__all__ = ["Action", "Mode", "OverflowSettings"]

Mode = Literal["replay", "hooks"]
Action = Literal["raise", "warn", "skip"]


@dataclass(frozen=True, kw_only=True)
class OverflowSettings:
    """The options of :class:`~lightning_lockstep.OverflowDetector`, which documents them.

    Raises:
        ConfigurationError: Some cannot be used; all of them are named.
    """

    max_frames_to_save: int = 21
    trace_batch_nums: tuple[int, ...] = ()
    abort_after_batch_num: int | None = None
    mode: Mode = "replay"
    action: Action = "raise"
    gradients: bool = True
    allow_inf: tuple[str, ...] = ()
    modules: tuple[str, ...] | None = None
    report_dir: Path | None = None
    max_skips: int = 10
    check_every_n_steps: int = 1
    underflow_threshold: float | None = 0.5
    underflow_every_n_steps: int = 100
    scale_floor: float = 1.0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        faults = [
            *_counts(self),
            *_choices(self),
            *_patterns("allow_inf", self.allow_inf),
            *(() if self.modules is None else _patterns("modules", self.modules)),
        ]
        if self.underflow_threshold is not None and not 0 < self.underflow_threshold <= 1:
            faults.append(
                f"underflow_threshold is {self.underflow_threshold!r}; expected a share above 0 and up to 1, or None"
                " to leave the watch out."
            )
        if self.check_every_n_steps != 1 and self.mode != "hooks":
            faults.append(
                f"check_every_n_steps={self.check_every_n_steps!r} goes with mode='hooks' only; mode='replay' looks at"
                " every step."
            )
        if self.check_every_n_steps != 1 and self.action == "skip":
            faults.append(
                f"check_every_n_steps={self.check_every_n_steps!r} does not go with action='skip': a step that was"
                " taken cannot be left out any more. Use 1, or action='raise' or 'warn'."
            )
        if faults:
            raise ConfigurationError([f"OverflowDetector: {fault}" for fault in faults])


def sequence(value: Any) -> Any:
    """Return a sequence as a tuple, so that lists from a config file do; anything else as it is."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _counts(settings: OverflowSettings) -> list[str]:
    faults = []
    for name, least in (
        ("max_frames_to_save", 1),
        ("max_skips", 1),
        ("check_every_n_steps", 1),
        ("underflow_every_n_steps", 1),
    ):
        value = getattr(settings, name)
        if not _whole(value) or value < least:
            faults.append(f"{name} is {value!r}; expected a whole number from {least}.")
    last = settings.abort_after_batch_num
    if last is not None and (not _whole(last) or last < 0):
        faults.append(f"abort_after_batch_num is {last!r}; expected a batch number from 0, or None.")
    batches = settings.trace_batch_nums
    if not isinstance(batches, tuple) or any(not _whole(n) or n < 0 for n in batches):
        faults.append(
            f"trace_batch_nums is {batches!r}; expected a list of batch numbers from 0, such as [1, 3]."
        )
    for name in ("scale_floor", "timeout"):
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            faults.append(f"{name} is {value!r}; expected a number above 0.")
    return faults


def _choices(settings: OverflowSettings) -> list[str]:
    faults = []
    for name, known in (("mode", ("replay", "hooks")), ("action", ("raise", "warn", "skip"))):
        value = getattr(settings, name)
        if value not in known:
            faults.append(f"{name} is {value!r}; expected one of {', '.join(map(repr, known))}.")
    if not isinstance(settings.gradients, bool):
        faults.append(f"gradients is {settings.gradients!r}; expected True or False.")
    return faults


def _patterns(name: str, value: Any) -> list[str]:
    if isinstance(value, tuple) and all(isinstance(pattern, str) for pattern in value):
        return []
    return [f"{name} is {value!r}; expected a list of name patterns, such as ['*.mask*']."]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
