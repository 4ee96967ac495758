"""The settings of StaticShapes, checked together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_lockstep._settings import Faults, is_number, is_whole

__all__ = ["Key", "StaticShapesSettings"]

Key = str | int


@dataclass(frozen=True, kw_only=True)
class StaticShapesSettings:
    """The arguments of :class:`StaticShapes`, checked; see there."""

    last_batch: Literal["drop", "pad", "keep"] = "drop"
    evaluation_last_batch: Literal["pad", "keep"] = "keep"
    evaluation_at_training_size: bool = True
    fill_values: Mapping[Key, float] | None = None
    sequence_lengths: Sequence[int] = ()
    sequence_values: Mapping[Key, float] | None = None
    sequence_dim: int = 1

    def __post_init__(self) -> None:
        faults = Faults()
        faults.choice("last_batch", self.last_batch, ("drop", "pad", "keep"))
        faults.choice("evaluation_last_batch", self.evaluation_last_batch, ("pad", "keep"))
        faults.flag("evaluation_at_training_size", self.evaluation_at_training_size)
        faults.whole("sequence_dim", self.sequence_dim, what="a dimension of the tensors")
        self._check_lengths(faults)
        for name in ("fill_values", "sequence_values"):
            given = getattr(self, name)
            what = (
                "a value for each key of the batch (a position, where it is a list), such as {'labels': -100}"
            )
            faults.check(given is None or _are_values(given), name, given, what)
        if bool(self.sequence_lengths) != bool(self.sequence_values):
            faults.add(
                f"sequence_lengths={self.sequence_lengths!r} with sequence_values={self.sequence_values!r}: expected"
                " both or none: the lengths, and which tensors are padded to them with what."
            )
        if self.fill_values and "pad" not in (self.last_batch, self.evaluation_last_batch):
            faults.add(
                f"fill_values={self.fill_values!r} with last_batch={self.last_batch!r} and evaluation_last_batch="
                f"{self.evaluation_last_batch!r}: expected 'pad' for one of them, as nothing is padded otherwise."
            )
        faults.raise_all()

    def _check_lengths(self, faults: Faults) -> None:
        given = self.sequence_lengths
        # A string is a sequence too, and so are the lists of a configuration.
        is_right = isinstance(given, Sequence) and all(is_whole(one) and one > 0 for one in given)
        is_right = is_right and list(given) == sorted(set(given))
        faults.check(is_right, "sequence_lengths", given, "lengths that grow, such as [64, 128, 256]")

    def pads(self, stage: str) -> bool:
        """Return whether the last batch of a stage is padded."""
        return (self.last_batch if stage == "training" else self.evaluation_last_batch) == "pad"


def _are_values(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(key, (str, int)) and is_number(value) for key, value in given.items()
    )
