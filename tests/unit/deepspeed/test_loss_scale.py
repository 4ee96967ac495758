"""Which skipped steps are ordinary, and what is said once of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from lightning_lockstep._doors.deepspeed_engines import StepOutcome
from lightning_lockstep.deepspeed.precision import LossScaleHistory


def told(outcomes: Iterable[StepOutcome]) -> list[str | None]:
    history = LossScaleHistory()
    news = []
    for outcome in outcomes:
        history.record(outcome)
        news.append(history.news())
    return news


def of_scaler(scales: Iterable[float]) -> list[StepOutcome]:
    """What torch's scaler says: no more than its scale."""
    return [StepOutcome(None, scale, is_dynamic=True, window=2000) for scale in scales]


def test_a_scale_that_nothing_lowers() -> None:
    """As with torch_autocast in float16 under ZeRO of 0.19, which skips before torch's scaler hears of it."""
    history = LossScaleHistory()
    for _ in range(7):
        history.record(StepOutcome(True, 65536.0, is_dynamic=True, window=2000))
    assert history.verdict() is None
    history.record(StepOutcome(True, 65536.0, is_dynamic=True, window=2000))
    assert "the loss scale stays at 65536: nothing lowers it" in str(history.verdict())


def test_news_are_told_once_for_each_kind() -> None:
    outcomes = [StepOutcome(True)] * 3 + [StepOutcome(False)] + [StepOutcome(True)]
    texts = told(outcomes)
    assert [text is not None for text in texts] == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        (lambda: of_scaler([2.0**16] * 5), False),
        (lambda: [StepOutcome(True, 2.0**14, True, floor=1.0, window=4)] * 3, False),
        (lambda: [StepOutcome(False, 1.0, True, floor=1.0, window=1000)] * 3, False),
        (lambda: [StepOutcome(True, 1.0, True, floor=1.0, window=1000)], True),
    ],
    ids=["no-skip", "start", "starts-at-its-floor", "floor"],
)
def test_what_is_ordinary(change: Callable[[], list[StepOutcome]], is_told: bool) -> None:
    assert any(told(change())) is is_told


def test_a_skip_that_was_asked_for_says_nothing() -> None:
    history = LossScaleHistory()
    for _ in range(20):
        history.expect_skip()
        history.record(StepOutcome(True))
    assert history.verdict() is None and (history.steps, history.skips) == (20, 0)
    history.record(StepOutcome(True))
    assert "no loss scale is in use" in str(history.verdict())
