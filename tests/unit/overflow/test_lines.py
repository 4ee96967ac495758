"""Where no module made the first bad value, the report names the line that did; what may be infinite is told apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_lockstep import OverflowDetectedError, OverflowDetector
from tests.common.overflow.models import WIDTH, data, fit


class Opaque(torch.autograd.Function):
    """An operation of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * float("nan")  # the operation

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).masked_fill(torch.arange(WIDTH, device=x.device) > 5, float("-inf"))


class Step(LightningModule):
    """Goes wrong in batch 1, in a way of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.mask, self.how = nn.Linear(WIDTH, WIDTH), Mask(), how

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, zero = self.layer(batch), 0.0 if batch_idx == 1 else 1.0
        x = (
            torch.softmax(x.masked_fill(torch.arange(WIDTH, device=x.device) > 5, float("-inf")), -1) + 1
        )  # meant
        if self.how == "log":
            x = torch.log(x.abs() * zero + (1 - zero) * 0.0)  # the logarithm
        if self.how == "division":
            x = x / (x.sum() * zero)  # the division
            x *= 0.0  # the product
        if self.how == "in place":
            x = (x * 1).div_(zero)  # the division
        if self.how == "backward":
            x = (x * zero).square().sum(-1).sqrt()  # the root
        if self.how == "code":
            x = self.layer(x / zero)  # the division
        if self.how == "opaque" and zero == 0:
            x = Opaque.apply(x)
        if self.how == "mask":
            x = torch.softmax(x + self.mask(x), -1)
        return x.mean() + (4.2 if self.how == "mask" else 0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


#: What the report says of the line, and what of the source follows.
LINES = {
    "log": ["inf was made of finite values by log, test_lines.py:", "# the logarithm"],
    "division": [
        "inf was made of finite values by (?:true)?div, test_lines.py:",
        "# the division",
        "nan was made of it by i?mul, test_lines.py:",
        "# the product",
    ],
    "in place": ["inf was made of finite values by div, test_lines.py:", "# the division"],
    "backward": ["inf was made of finite gradients by the backward of sqrt, test_lines.py:", "# the root"],
    "code": [
        "before it called layer",
        "inf was made of finite values by (?:true)?div, test_lines.py:",
        "# the division",
    ],
    "opaque": ["nan was made of finite values by mul, test_lines.py:", "in forward: .*# the operation"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", LINES)
def test_the_line_is_named(tmp_path: Path, how: str) -> None:
    detector = OverflowDetector()
    with pytest.raises(OverflowDetectedError) as raised:
        fit(Step(how), data(batches=3), detector, default_root_dir=tmp_path)
    assert "batch_number=1 " in str(raised.value)
    for text in (str(raised.value), detector.reports[0].text()):
        assert re.search("(?s:.*)".join(LINES[how]), text), text
    assert len(detector.reports[0].lines) == (2 if how in ("division", "code") else 1)


@pytest.mark.filterwarnings("ignore")
def test_an_output_that_is_meant_to_be_infinite(tmp_path: Path) -> None:
    detector = OverflowDetector(mode="hooks")
    with pytest.raises(OverflowDetectedError) as raised:
        fit(Step("mask"), data(batches=3), detector, default_root_dir=tmp_path)
    assert "an output of a module is not finite, while the loss is." in str(raised.value)
    text = detector.reports[0].text()
    assert "allow_inf=['mask.output']" in str(raised.value) and "allow_inf=['mask.output']" in text
    assert "loss 4." in text and "nan, 0 inf" not in text
    allowed = OverflowDetector(mode="hooks", allow_inf=["mask.output"])
    fit(Step("mask"), data(batches=3), allowed, default_root_dir=tmp_path)
