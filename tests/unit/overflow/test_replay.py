"""A replay runs what the step ran, leaves no trace, and is left out where one rank cannot step alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_lockstep import ConfigurationError, OverflowDetectedError, OverflowDetector
from lightning_lockstep.overflow.frames import Producer
from lightning_lockstep.overflow.replay import advice
from lightning_lockstep.steps.capabilities import Capabilities
from tests.models.overflow.models import BadBackward, Explode, Task, data, fit


class OwnHooks(Task):
    """Notes its own hooks, and makes the loss bad in its own ``backward``."""

    called: ClassVar[list[str]] = []  # of the class: what an instance holds is put back after a replay

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Tanhshrink(), nn.Tanh()))
        self.marked = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.marked = bool((batch > 50).any())
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.called.append("on_before_backward")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.called.append("backward")
        super().backward(loss * float("inf") if self.marked else loss, *args, **kwargs)

    def on_after_backward(self) -> None:
        self.called.append("on_after_backward")


def test_the_modules_own_hooks_run_in_a_replay(tmp_path: Path) -> None:
    OwnHooks.called.clear()
    detector, model = OverflowDetector(), OwnHooks()
    with pytest.raises(OverflowDetectedError, match="batch_number=2 "):
        fit(model, data(batches=4, marked={2: 0}), detector, default_root_dir=tmp_path)
    hooks = ["on_before_backward", "backward", "on_after_backward"]
    assert OwnHooks.called == 4 * hooks, "three steps, and the replay of the third"
    (report,) = detector.reports
    assert not report.notes and report.gradients
    assert report.clean is False
    for text in (report.head(), report.text()):
        assert "code of training_step or" in text and "detect_overflow(tensor, 'name')" in text


def test_a_replay_leaves_the_attributes_of_the_module_alone(tmp_path: Path) -> None:
    model = Task(nn.Sequential(nn.Tanhshrink(), Explode()))
    fit(model, data(batches=4, marked={2: 0}), OverflowDetector(action="skip"), default_root_dir=tmp_path)
    assert len(model.losses) == 4, "a list that training_step appends to has nothing of the replay"


class InParts(SingleDeviceStrategy):
    """A strategy without whole gradients."""

    @property
    def step_capabilities(self) -> Capabilities:
        return Capabilities(whole_gradients=False)


def test_a_strategy_without_whole_gradients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"does not work with InParts: it does not keep whole gradients"):
        fit(Task(), data(batches=1), OverflowDetector(), strategy=InParts("cpu"), default_root_dir=tmp_path)


@pytest.mark.usefixtures("device")
def test_an_overflow_in_the_backward_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    """Dropout draws from the generator; the loss that goes into the backward is the same twice."""
    losses: list[float] = []

    class Noted(Task):
        def on_before_backward(self, loss: Tensor) -> None:
            losses.append(float(loss.detach()))

    model = Noted(nn.Sequential(nn.Dropout(0.5), nn.Tanhshrink(), nn.Dropout(0.3), BadBackward()))
    detector = OverflowDetector()
    with pytest.raises(OverflowDetectedError):
        fit(
            model,
            data(batches=9, marked={n: n % 4 for n in range(4, 9)}),
            detector,
            accumulate_grad_batches=2,
            default_root_dir=tmp_path,
        )
    origin = detector.reports[0].occasion.batch_number
    assert losses[-1] == losses[origin]
    assert not detector.reports[0].notes


def test_a_wider_format_is_advised_than_the_one_in_use() -> None:
    bad = Producer("module", "net", "Linear", ("output",), "bfloat16: 4 nan", low_precision=True)
    assert advice(bad).endswith("or train in 32-true.")
    assert advice(replace(bad, remarks="float16: 4 inf")).endswith("or train in bf16-mixed or 32-true.")
