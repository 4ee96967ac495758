"""What OverflowDetector asks of an engine of a DeepSpeed that is older, or not known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_lockstep import ConfigurationError
from lightning_lockstep.deepspeed.engine_adapters import adapter_of, gradients_of


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
