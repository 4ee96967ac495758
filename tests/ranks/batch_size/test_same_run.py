"""One seed and one global batch give the same loss curve on one rank and on two: docs/same-run.md."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_ranks
from tests.models.batch_size.same_run import STEPS, Variant, curve, largest_difference

# With max pooling two values of a window may be equal but for rounding, and the gradient goes to one or the other.
VARIANT = Variant("SGD", "32-true", "average")


def curves(ranks: int, micro_batches: list[int], folder: str) -> list[list[float]]:
    return [curve(ranks, micro_batch, VARIANT, folder) for micro_batch in micro_batches]


def test_two_ranks_with_and_without_accumulation(tmp_path: Path) -> None:
    ((alone,),) = run_ranks(1, curves, 1, [64], str(tmp_path), backend=None, timeout=170)
    found = run_ranks(2, curves, 2, [32, 8], str(tmp_path), backend=None, timeout=170)[0]
    assert len(alone) == STEPS and alone[-1] < alone[0] - 0.3
    assert [len(one) for one in found] == [STEPS] * 2
    assert max(largest_difference(one, alone) for one in found) < 1e-5
