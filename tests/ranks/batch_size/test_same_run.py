"""One seed and one global batch give the same loss curve on one rank and on two: docs/same-run.md.

More ranks, one process that accumulates and more ways of training are in ``tests/variants``.
"""

from __future__ import annotations

from pathlib import Path

from tests.common.batch_size.same_run import SETUPS, STEPS, Variant, curves, largest_difference
from tests.helpers import run_ranks

Setups = tuple[tuple[int, int], ...]
Variants = tuple[Variant, ...]

# float32 with max pooling is not among them: if two values of a pooling window are equal but for rounding, the gradient
# goes to one or the other (docs/same-run.md).
TOLERANCES = {
    Variant("AdamW", "64-true"): 1e-12,
    Variant("SGD", "32-true", "average"): 1e-5,
    Variant("AdamW", "32-true", "average"): 1e-5,
}


ALL, SOME = tuple(TOLERANCES), tuple(TOLERANCES)[1:2]


def curves_of(ranks: int, folder: str, setups: Setups, variants: Variants = ALL) -> list[list[list[float]]]:
    """Return the curves of each set-up with so many ranks."""
    return [curves(ranks, micro, list(variants), folder) for n, micro in setups if n == ranks]


def compare(found: list[list[list[float]]], reference: list[list[float]], variants: Variants = ALL) -> None:
    assert found
    for setup in found:
        for variant, values, same in zip(variants, setup, reference, strict=True):
            assert len(values) == STEPS and values[-1] < values[0] - 0.3
            assert largest_difference(values, same) < TOLERANCES[variant], str(variant)


def test_two_ranks_with_and_without_accumulation(tmp_path: Path) -> None:
    ((reference,),) = run_ranks(1, curves_of, 1, str(tmp_path), SETUPS[:1], SOME, backend=None, timeout=170)
    found = run_ranks(2, curves_of, 2, str(tmp_path), SETUPS, SOME, backend=None, timeout=170)[0]
    assert len(found) == 2
    compare(found, reference, SOME)
