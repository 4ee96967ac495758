"""A step split into micro-batches against the same step on the whole batch: every hook acts as it would there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.batch_size.models import FULL, trainer
from tests.common.batch_size.same_run import strategy_for
from tests.common.steps.models import Hooked
from tests.helpers import run_ranks


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, full: bool) -> Tensor:
        ctx.full = full
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.full:
            raise RuntimeError(FULL)
        return grad, None


class WithGradientHooks(Hooked):
    """Hooks on parameters that are no linear functions, and one on the module that changes gradients."""

    def __init__(self, most: int, where: str) -> None:
        super().__init__(most, where=where, rows=96)
        self.batch_size = 16
        self.hooked = [0, 0]

    def configure_optimizers(self) -> Any:
        self.first.weight.register_hook(self.clamped)
        self.last.weight.register_post_accumulate_grad_hook(self.signed)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def clamped(self, grad: Tensor) -> Tensor:
        self.hooked[0] += 1
        return grad.clamp(-0.01, 0.01) + 0.001

    def signed(self, parameter: Tensor) -> None:
        self.hooked[1] += 1
        parameter.grad = 0.1 * parameter.grad.sign()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.samples = len(batch[0])
        self.called("training_step")
        hidden = _FailsInBackward.apply(
            torch.relu(self.first(batch[0])), self.where == "halfway" and self.samples > self.most
        )
        return (self.last(hidden) - 1).pow(2).mean()

    def on_after_backward(self) -> None:
        super().on_after_backward()
        self.last.bias.grad = self.last.bias.grad**2

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.called("configure_gradient_clipping")


WHERE = ["", "training_step", "halfway", "backward"]


def runs(ranks: int, folder: str) -> list[Any]:
    from lightning_lockstep import AutoBatchSize

    warnings.simplefilter("ignore")
    answers = []
    for where in WHERE:
        module = WithGradientHooks(8, where)
        callback = AutoBatchSize("off", on_oom="split")
        run = trainer(
            folder,
            callback,
            devices=ranks,
            strategy=strategy_for(ranks),
            max_steps=3,
            accumulate_grad_batches=1,
        )
        run.fit(module)
        counts = {name: module.calls.count(name) for name in set(module.calls)}
        weights = [p.detach().clone() for p in module.parameters()]
        answers.append((weights, counts, tuple(module.hooked)))
    return answers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.allow_leaks("env:POPULATE", "env")
@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_act_on_the_gradient_of_the_whole_batch_once(world_size, tmp_path):
    for answer in run_ranks(world_size, runs, world_size, str(tmp_path), backend=None, timeout=170):
        (expected, _, hooked), *split = answer
        assert hooked == (3, 3)
        for where, (weights, counts, times) in zip(WHERE[1:], split, strict=True):
            for given, right in zip(weights, expected, strict=True):
                torch.testing.assert_close(given, right, msg=lambda text, where=where: f"{where}: {text}")
            assert times == (3, 3), where
            assert counts["on_before_zero_grad"] == counts["on_after_backward"] == 3, where
            assert counts["backward"] > 3, where
