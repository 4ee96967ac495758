"""Skipped steps: what engines say of them, and which of them are ordinary. Float16 is in ``tests/variants``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.engine_adapters import StepOutcome, adapter_of
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


def feed_scaler() -> dict[str, Any]:
    """Give DeepSpeed's own scaler nothing but overflows; return the verdict and the scale after each, and the end."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    given = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
    scaler = CreateLossScaler(torch.half, None, True, {**given, "consecutive_hysteresis": False})
    history, rows = LossScaleHistory(), []
    for _ in range(30):
        try:
            scaler.update_scale(True)
        except Exception as error:  # how DeepSpeed ends a run at the floor
            return {"rows": rows, "end": str(error)}
        history.record(adapter_of(engine_of(scaler, True)).outcome())  # type: ignore[arg-type]
        rows.append((history.verdict(), scaler.cur_scale))
    return {"rows": rows, "end": ""}


class Bare:
    """Holds attributes, as an engine and its optimizer do."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def engine_of(scaler: Any, overflow: bool) -> Bare:
    return Bare(optimizer=Bare(loss_scaler=scaler, overflow=overflow, dtype=torch.float16))


def all_engines() -> dict[str, dict[str, Any]]:
    return {**train_all(ENGINES), "nan": feed_scaler()}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return run_ranks(1, all_engines, timeout=120)[0]  # type: ignore[no-any-return]


def test_nan_from_the_first_step_is_told_long_before_the_floor(found: dict[str, dict[str, Any]]) -> None:
    rows = found["nan"]["rows"]
    first = next(number for number, (text, _) in enumerate(rows) if text)
    assert rows[first][0].startswith("10 optimizer steps in a row were skipped, at a loss scale of 128 now")
    assert rows[first][1] == 2.0**7
    # Then it is at the floor, where DeepSpeed ends the run with the next one.
    assert (
        rows[-1][0].startswith("The loss scale has reached its floor, min_loss_scale=1")
        and rows[-1][1] == 1.0
    )
    assert found["nan"]["end"].startswith("Current loss scale already at minimum")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_real_engine_in_bfloat16(found: dict[str, dict[str, Any]], stage: int) -> None:
    answer = found[f"bf16 {stage}"]
    assert answer["outcomes"] == [StepOutcome(skipped) for skipped in (False, True, False, True)]
    assert answer["changed"] == [True, False, True, False]
    assert answer["skipped_steps"] == 2
    assert answer["verdict"].startswith("An optimizer step was skipped though the loss is not scaled")


def test_a_real_engine_in_float32_has_nothing_to_say(found: dict[str, dict[str, Any]]) -> None:
    assert found["fp32 0"]["outcomes"] == [None, None]
