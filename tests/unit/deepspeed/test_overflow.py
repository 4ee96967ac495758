"""What OverflowDetector asks of an engine, and when a skipped step of it is an alarm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_lockstep import ConfigurationError
from lightning_lockstep.deepspeed.engine_adapters import adapter_of, gradients_of
from lightning_lockstep.overflow.diagnose import Diagnosis
from lightning_lockstep.overflow.settings import OverflowSettings


class Scaled:
    """What the detector asks of an engine that trains in float16, which this machine may not have."""

    def __init__(self, scale: float, too_many: str | None = None) -> None:
        self.scale, self.too_many = scale, too_many

    def loss_scale(self) -> tuple[float, float]:
        return self.scale, 4.0

    def why_skips_are_too_many(self) -> str | None:
        return self.too_many


class Alone:
    """A publisher on the only rank."""

    settings, communicator = OverflowSettings(), None

    def collect(self, entry: Any) -> Any:
        return SimpleNamespace(entries={0: entry})


@pytest.mark.parametrize(
    ("engine", "loss", "why"),
    [
        (Scaled(65536), 1.0, None),
        (Scaled(65536), float("inf"), "the forward is not finite"),
        (Scaled(4), 1.0, "the loss scale is down to 4"),
        (Scaled(65536, "8 steps in a row were skipped."), 1.0, "8 steps in a row were skipped"),
    ],
)
def test_an_ordinary_skip_of_a_loss_scale_is_no_alarm(engine: Any, loss: float, why: str | None) -> None:
    nothing: Any = None
    publisher: Any = Alone()
    diagnosis = Diagnosis(nothing, nothing, publisher, engine)
    record: Any = SimpleNamespace(loss=torch.tensor(loss), activation_flag=None)
    found = diagnosis.why_alarm(record)
    assert found is None if why is None else found is not None and why in found


def test_an_unknown_optimizer_of_deepspeed_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="where SimpleNamespace of this DeepSpeed keeps gradients"):
        gradients_of(SimpleNamespace(optimizer=SimpleNamespace()))


def test_a_skipped_step_of_bf16_is_no_overflow_for_ever_where_the_optimizer_does_not_look_for_one() -> None:
    """Up to DeepSpeed 0.19.7 its optimizer of bfloat16 has no ``overflow``, and would never take it back."""

    class Optimizer:
        fp32_groups_gradients: tuple[()] = ()
        steps = 0

        def step(self) -> None:
            self.steps += 1

        def clear_hp_grads(self) -> None: ...

        def clear_lp_grads(self) -> None: ...

    engine: Any = SimpleNamespace(optimizer=Optimizer())
    gradients_of(engine).skip_step()
    engine.optimizer.step()
    assert engine.optimizer.steps == 0
    engine.optimizer.step()
    assert engine.optimizer.steps == 1
    assert adapter_of(engine).outcome() is None
