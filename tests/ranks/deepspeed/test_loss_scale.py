"""Steps that DeepSpeed skips: what a fit says of them, and which are ordinary. Float16 is in ``tests/variants``."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.engine import LossScaleHistory
from lightning_lockstep.deepspeed.engine_adapters import adapter_of
from tests.harness import run_ranks
from tests.models.deepspeed.run_config import Net, loader, trainer

INF, NAN = float("inf"), float("nan")
TOLD = "lightning-lockstep: DeepSpeed has just skipped 1 optimizer step, and the loss is not scaled"
#: Sections of the configuration beside the stage, and how many of four steps are skipped.
FITS: dict[str, tuple[dict[str, Any], int]] = {
    **{f"bf16, {stage}": ({"bf16": {"enabled": True, "check_grad_overflow": True}}, 2) for stage in (0, 1, 2, 3)},
    "fp32, 0": ({}, 0),
}


class Explodes(Net):
    """Its loss is multiplied by a factor of each batch."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = factors

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.factors[batch_idx]


def fitted(config: dict[str, Any], factors: list[float], ranks: int = 1) -> tuple[LossScaleHistory, str]:
    """Fit with these factors; return the history of the loss scale, and what was said."""
    said, runner = io.StringIO(), trainer(config, devices=ranks, limit_train_batches=len(factors))
    with redirect_stderr(said):
        runner.fit(Explodes(factors), loader(2))
    return runner.precision_plugin.history, said.getvalue()  # type: ignore[attr-defined]


def skipped_and_told() -> dict[str, tuple[int, int]]:
    found = {}
    for name, (sections, skipped) in FITS.items():
        config = {"zero_optimization": {"stage": int(name[-1])}, **sections}
        history, said = fitted(config, [1.0, INF, 1.0, NAN] if skipped else [1.0] * 4)
        found[name] = history.skips, said.count(TOLD)
    return found


def feed_scaler() -> tuple[list[tuple[str | None, float]], str]:
    """Give DeepSpeed's own scaler nothing but overflows; return the verdict and the scale after each, and the end."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    given = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
    scaler = CreateLossScaler(torch.half, None, True, {**given, "consecutive_hysteresis": False})
    optimizer = SimpleNamespace(loss_scaler=scaler, overflow=True)
    adapter = adapter_of(SimpleNamespace(optimizer=optimizer, fp16_enabled=lambda: True))
    history, rows = LossScaleHistory(), []
    for _ in range(30):
        try:
            scaler.update_scale(True)
        except Exception as error:  # how DeepSpeed ends a run at the floor
            return rows, str(error)
        optimizer.loss_scale = scaler.cur_scale
        history.record(adapter.outcome())  # type: ignore[arg-type]
        rows.append((history.verdict(), scaler.cur_scale))
    return rows, ""


def all_of_it() -> tuple[Any, Any]:
    return skipped_and_told(), feed_scaler()


@pytest.fixture(scope="module")
def found() -> tuple[Any, Any]:
    return run_ranks(1, all_of_it, timeout=120)[0]  # type: ignore[no-any-return]


def test_a_step_that_is_skipped_without_a_loss_scale_is_told_once(found: tuple[Any, Any]) -> None:
    assert found[0] == {name: (skipped, min(skipped, 1)) for name, (_, skipped) in FITS.items()}


def test_nan_from_the_first_step_is_told_long_before_the_floor(found: tuple[Any, Any]) -> None:
    rows, end = found[1]
    text, scale = next(row for row in rows if row[0])
    assert text.startswith("DeepSpeed has just skipped 10 optimizer steps, and the loss scale is 128")
    assert scale == 2.0**7
    # Then it is at the floor, where DeepSpeed ends the run with the next one.
    text, scale = rows[-1]
    assert text.startswith("The loss scale has reached its floor, min_loss_scale=1") and scale == 1.0
    assert end.startswith("Current loss scale already at minimum")
