"""Skipped steps: what engines say of them, and which of them are ordinary. Float16 is in ``tests/variants``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lockstep._doors.deepspeed_engines import StepOutcome, adapter_of
from lightning_lockstep.deepspeed.precision import LossScaleHistory
from tests.common.deepspeed.loss_scale import Run, train_all
from tests.helpers import run_ranks

NAN = float("nan")
ENGINES: dict[str, Run] = {
    **{
        f"bf16 {stage}": (stage, "bf16", [1.0, float("inf"), 1.0, NAN], {"check_grad_overflow": True})
        for stage in (0, 1, 2, 3)
    },
    "fp32 0": (0, "fp32", [1.0, 1.0], {}),
}
CALM = [True] * 3 + [False] * 200
ROWS: dict[str, list[bool]] = {
    "start": [True] * 8 + [False] * 500,
    "nan": [True] * 30,
    "seven": CALM + [True] * 7,
    "eight": CALM + [True] * 8,
}


def feed_scalers() -> dict[str, dict[str, Any]]:
    return {name: feed_scaler(row) for name, row in ROWS.items()}


def feed_scaler(overflows: list[bool]) -> dict[str, Any]:
    """Give DeepSpeed's own scaler a row of overflows, and the history what it says after each."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    given = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
    scaler = CreateLossScaler(torch.half, None, True, {**given, "consecutive_hysteresis": False})
    history = LossScaleHistory()
    verdicts: list[str | None] = []
    end = ""
    for overflow in overflows:
        try:
            scaler.update_scale(overflow)
        except Exception as error:  # how DeepSpeed ends a run at the floor
            end = str(error)
            break
        history.record(adapter_of(engine_of(scaler, overflow)).outcome())  # type: ignore[arg-type]
        verdicts.append(history.verdict())
    return {
        "verdicts": verdicts,
        "first": next((n for n, text in enumerate(verdicts, 1) if text), None),
        "last": verdicts[-1],
        "counts": (history.steps, history.skips, history.skips_in_a_row),
        "scales": list(history.scales),
        "end": end,
    }


class Bare:
    """Holds attributes, as an engine and its optimizer do."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def engine_of(scaler: Any, overflow: bool) -> Bare:
    return Bare(optimizer=Bare(loss_scaler=scaler, overflow=overflow, dtype=torch.float16))


def all_engines() -> dict[str, dict[str, Any]]:
    return {**train_all(ENGINES), **feed_scalers()}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return run_ranks(1, all_engines, timeout=120)[0]  # type: ignore[no-any-return]


def test_a_scale_that_comes_down_at_the_start_is_ordinary(found: dict[str, dict[str, Any]]) -> None:
    # 2^16 down to 2^9, and then it fits.
    answer = found["start"]
    assert answer["scales"][:9] == [2.0**16, *(2.0**power for power in range(15, 8, -1)), 2.0**9]
    assert answer["first"] is None
    assert answer["counts"] == (508, 8, 0)


def test_nan_from_the_first_step_is_told_long_before_the_floor(found: dict[str, dict[str, Any]]) -> None:
    answer = found["nan"]
    assert answer["scales"][answer["first"] - 1] == 2.0**8
    assert answer["verdicts"][answer["first"] - 1].startswith("8 steps in a row or more were skipped")
    assert "nan or infinite at any scale" in answer["verdicts"][answer["first"] - 1]
    # Then it is at the floor, where DeepSpeed ends the run with the next one.
    assert answer["scales"][-1] == 1.0
    assert "its floor, min_loss_scale=1" in answer["last"]
    assert "The next overflow ends the run." in answer["last"]
    assert "Loss scale: " in answer["last"] and answer["last"].endswith("4, 2, 1.")
    assert answer["end"].startswith("Current loss scale already at minimum")
    assert answer["counts"][0] < 30


def test_many_in_a_row_later_on(found: dict[str, dict[str, Any]]) -> None:
    assert found["seven"]["first"] is None
    assert found["eight"]["first"] == len(CALM) + 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_real_engine_in_bfloat16(found: dict[str, dict[str, Any]], stage: int) -> None:
    answer = found[f"bf16 {stage}"]
    assert answer["outcomes"] == [StepOutcome(skipped) for skipped in (False, True, False, True)]
    assert answer["changed"] == [True, False, True, False]
    assert answer["skipped_steps"] == 2
    assert answer["verdict"].startswith("A step was skipped though no loss scale is in use")


def test_a_real_engine_in_float32_has_nothing_to_say(found: dict[str, dict[str, Any]]) -> None:
    assert found["fp32 0"]["outcomes"] == [None, None]
