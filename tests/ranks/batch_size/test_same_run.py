"""One seed and one global batch give the same loss curve on any set-up: docs/same-run.md."""

from __future__ import annotations

import pytest

from tests.common.batch_size.same_run import SETUPS, STEPS, Variant, curves, largest_difference
from tests.helpers import run_ranks

# float32 with max pooling and AdamW is not among them: where two values of a pooling window are equal but for
# rounding, the gradient goes to one or the other (docs/same-run.md).
TOLERANCES = {
    Variant("AdamW", "64-true"): 1e-12,
    Variant("SGD", "32-true"): 1e-5,
    Variant("AdamW", "32-true", "average"): 1e-5,
}


def curves_of(ranks: int, folder: str) -> list[list[list[float]]]:
    """Return the curves of each set-up with so many ranks: with and without accumulation."""
    return [curves(ranks, micro, list(TOLERANCES), folder) for n, micro in SETUPS if n == ranks]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[float]]]:
    """The curves of one process."""
    (found,) = run_ranks(1, curves_of, 1, str(tmp_path_factory.mktemp("one")), backend=None, timeout=170)
    return found


def compare(found: list[list[list[float]]], reference: list[list[list[float]]]) -> None:
    for setup in found:
        for variant, values, same in zip(TOLERANCES, setup, reference[0], strict=True):
            assert len(values) == STEPS and values[-1] < values[0] - 0.3
            assert largest_difference(values, same) < TOLERANCES[variant], str(variant)


def test_one_process_with_and_without_accumulation(reference: list[list[list[float]]]) -> None:
    compare(reference, reference)


def test_two_ranks_with_and_without_accumulation(tmp_path, reference: list[list[list[float]]]) -> None:
    compare(run_ranks(2, curves_of, 2, str(tmp_path), backend=None, timeout=170)[0], reference)
