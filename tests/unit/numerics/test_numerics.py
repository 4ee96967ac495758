"""Statistics, the fused check and float32 islands, without a Trainer."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lockstep import ConfigurationError, FP32Modules, OverflowDetector, detect_overflow, run_in_fp32
from lightning_lockstep.numerics.precision import runs_in_fp32, undo_run_in_fp32
from lightning_lockstep.numerics.statistics import any_bad, has_bad_values, tensor_statistics
from tests.models.overflow.models import WIDTH, Task, data, fit

INF, NAN = float("inf"), float("nan")


def test_the_figures_of_a_float16_tensor() -> None:
    x = torch.tensor([[0.0, -65504.0], [6e-8, 1.0], [INF, NAN], [2.0, -INF]], dtype=torch.float16)
    figures = tensor_statistics(x)
    assert figures is not None
    assert (figures.nan, figures.inf, figures.places) == (1, 2, (2, 3))
    assert math.isnan(figures.abs_max)
    assert figures.range_used == 1.0
    assert (figures.zero, figures.subnormal, figures.flushed) == (1 / 8, 1 / 8, 0)
    assert figures.remarks() == "float16: 1 nan, 2 inf, at [2, 3], 100.0% of range, 12.5% zero, 12.5% subnormal"
    assert figures.as_json()["abs_max"] == "nan"


def test_a_float32_weight_is_measured_in_the_format_it_is_used_in() -> None:
    figures = tensor_statistics(torch.tensor([1e-9, 1e-6, 1.0, 32752.0]), used_as=torch.float16)
    assert figures is not None
    assert figures.used_as == "float16"
    assert (figures.flushed, figures.subnormal) == (0.25, 0.25)
    assert figures.range_used == pytest.approx(0.5)


ODD: dict[str, Any] = {
    "integer": torch.arange(3),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(1.0),
    "8 bits": torch.ones(4).to(torch.float8_e4m3fn),
    "no tensor": "text",
    "none": None,
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_values_do_no_harm(kind: str) -> None:
    assert not has_bad_values(ODD[kind])
    assert detect_overflow(ODD[kind], kind) is False
    tensor_statistics(ODD[kind])


def test_bad_values_are_seen_in_odd_tensors() -> None:
    bad = torch.tensor([0.0, NAN, 1.0])
    assert has_bad_values(bad.to_sparse())
    assert has_bad_values(torch.complex(bad, bad))
    assert not has_bad_values(torch.tensor([INF, 1.0]), allow_inf=True)
    assert has_bad_values(torch.tensor([INF, NAN]), allow_inf=True)


def test_detect_overflow_says_what_it_saw(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert detect_overflow(torch.tensor([1.0, INF], requires_grad=True), "scores") is True
    assert "scores: nan or inf found (float32: 1 inf, at [1]" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_fused_check_sees_each_bad_value_and_leaves_the_rest_alone(
    dtype: torch.dtype, value: float, device: str
) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(5, 7).to(dtype), torch.randn(300).to(dtype)[::3], torch.randn(()), torch.randn(4)]
    tensors = [tensor.to(device) for tensor in tensors]
    before = [t.clone() for t in tensors]
    assert any_bad(tensors) is False
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    for tensor in tensors[:2]:
        held = tensor.reshape(-1)[3].clone()
        tensor.view(-1)[3] = value
        assert any_bad(tensors) is True
        tensor.view(-1)[3] = held
    assert any_bad([]) is False
    assert any_bad([torch.full((9,), 3e38)] * 9) is False, "large values are finite"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, extra: Tensor | None = None) -> dict[str, Tensor]:
        self.seen.append(x.dtype)
        y = self.norm(self.linear(x))
        return {"y": y if extra is None else y + extra, "count": torch.tensor(3)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_low_precision_module_computes_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = Block()
    block = copy.deepcopy(wide).to(dtype)
    wide = copy.deepcopy(block).float()
    keys = list(block.state_dict())
    assert run_in_fp32(block) is block
    assert run_in_fp32(block) is block
    x = torch.randn(6, 4).to(dtype)
    out = block(x, extra=x)
    expected = wide(x.float(), extra=x.float())
    assert torch.equal(out["y"], expected["y"].to(dtype))
    assert block.seen == [torch.float32]
    assert list(block.state_dict()) == keys
    assert all(p.dtype is dtype for p in block.parameters())
    assert torch.equal(block.norm.running_mean, wide.norm.running_mean.to(dtype))
    assert int(block.norm.num_batches_tracked) == 1
    out["y"].float().square().sum().backward()
    expected["y"].to(dtype).float().square().sum().backward()
    for mine, other in zip(block.parameters(), wide.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.dtype is dtype
        assert torch.allclose(mine.grad.float(), other.grad, rtol=0.02, atol=0.05)
    undo_run_in_fp32(block)
    assert not runs_in_fp32(block)
    assert "forward" not in block.__dict__


def test_under_autocast_the_output_goes_back_to_the_dtype_of_the_input() -> None:
    torch.manual_seed(0)
    outer = nn.Sequential(nn.Linear(4, 4), run_in_fp32(nn.Linear(4, 4)))
    inside: list[torch.dtype] = []
    outer[1].register_forward_hook(lambda m, a, out: inside.append(out.dtype))
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = outer(x)
        high = outer[1](x)
    assert (low.dtype, high.dtype) == (torch.bfloat16, torch.float32)
    assert inside == [torch.bfloat16, torch.float32]
    assert torch.equal(high, torch.nn.functional.linear(x, outer[1].weight, outer[1].bias))
    low.sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32


class Fails(Task):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert runs_in_fp32(self.before), "within the fit it is changed"
        raise RuntimeError("in the first batch")


@pytest.mark.parametrize("of_user", [False, True])
def test_a_fit_that_fails_leaves_the_modules_as_they_were(of_user: bool) -> None:
    model = Fails(run_in_fp32(nn.Linear(WIDTH, WIDTH)) if of_user else None)
    with pytest.raises(RuntimeError, match="in the first batch"):
        fit(model, data(batches=1), FP32Modules(["before", "suspect"]))
    assert not runs_in_fp32(model.before)
    assert runs_in_fp32(model.suspect) == of_user, "what the user has changed stays changed"


@pytest.mark.parametrize(
    ("settings", "faults"),
    [
        ({"mode": "hook"}, ["mode='hook': expected one of 'replay', 'hooks'. Did you mean 'hooks'?"]),
        ({"action": "stop"}, ["action='stop': expected one of 'raise', 'warn', 'skip'."]),
        ({"max_frames_to_save": 0}, ["max_frames_to_save=0: expected a whole number from 1."]),
        ({"trace_batch_nums": 3}, ["trace_batch_nums=3: expected a list of batch numbers"]),
        ({"trace_batch_nums": [-1]}, ["expected a list of batch numbers from 0"]),
        ({"abort_after_batch_num": -2}, ["abort_after_batch_num=-2: expected the number of a batch from 0"]),
        ({"allow_inf": "*.mask"}, ["allow_inf='*.mask': expected a list of name patterns"]),
        ({"allow_inf": None}, ["allow_inf=None: expected a list of name patterns"]),
        ({"modules": "a"}, ["modules='a': expected a list of name patterns"]),
        ({"report_dir": 3}, ["report_dir=3: expected a folder"]),
        ({"check_every_n_steps": 5, "action": "skip"}, ["cannot be combined with action='skip'"]),
        ({"gradients": 1}, ["gradients=1: expected true or false"]),
        ({"timeout": 0}, ["timeout=0: expected a number, more than 0"]),
        (
            {"mode": "x", "action": "y", "max_skips": 0},
            ["3 settings", "mode='x'", "action='y'", "max_skips=0"],
        ),
    ],
)
def test_all_faults_of_the_settings_at_once(settings: dict[str, Any], faults: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OverflowDetector(**settings)
    assert all(fault in str(caught.value) for fault in faults)
