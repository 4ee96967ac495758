"""Which skipped steps are ordinary, and what is said once of the others."""

from __future__ import annotations

import pytest

from lightning_lockstep.deepspeed.engine_adapters import StepOutcome
from lightning_lockstep.deepspeed.precision import LossScaleHistory

SKIP, STEP = StepOutcome(True, 2.0**14, floor=1.0), StepOutcome(False, 2.0**14, floor=1.0)


def told(outcomes: list[StepOutcome]) -> list[str | None]:
    history, news = LossScaleHistory(), []
    for outcome in outcomes:
        history.record(outcome)
        news.append(history.news())
    return news


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([SKIP] * 9 + [STEP] + [SKIP] * 9, {}),
        ([SKIP] * 12, {10: "DeepSpeed has just skipped 10 optimizer steps, and the loss scale is 16384"}),
        ([STEP, StepOutcome(False, 1.0, floor=1.0)] * 2, {}),
        (
            [SKIP, StepOutcome(True, 1.0, floor=1.0)],
            {2: "The loss scale has reached its floor, min_loss_scale=1"},
        ),
        # What torch's scaler says: no more than its scale.
        ([StepOutcome(None, 2.0**power) for power in (16, 16, 15, 14)], {}),
        (
            [StepOutcome(None, 2.0**-power) for power in range(12)],
            {11: "DeepSpeed has just skipped 10 optimizer steps"},
        ),
        # Told once.
        (
            [StepOutcome(True), StepOutcome(False), StepOutcome(True)],
            {1: "DeepSpeed has just skipped 1 optimizer step, and the loss is not"},
        ),
    ],
)
def test_what_is_told(outcomes: list[StepOutcome], expected: dict[int, str]) -> None:
    found = {number: text for number, text in enumerate(told(outcomes), 1) if text is not None}
    assert found.keys() == expected.keys()
    assert all(text.startswith(expected[number]) for number, text in found.items())


def test_a_skip_that_was_asked_for_says_nothing() -> None:
    history = LossScaleHistory()
    for _ in range(20):
        history.expect_skip()
        history.record(StepOutcome(True))
    assert history.verdict() is None and history.skips == 0
    history.record(StepOutcome(True))
    assert "the loss is not scaled" in str(history.verdict())
