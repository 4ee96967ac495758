"""A step run alone is Lightning's own: every hook of the module acts, and nothing is left behind."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from lightning_lockstep import AutoBatchSize
from tests.harness import run_ranks
from tests.models.batch_size.models import trainer
from tests.models.batch_size.same_run import strategy_for
from tests.models.steps.models import AUTOMATIC, Hooked

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.allow_leaks("env:POPULATE", "env"),
]


class ParameterHooks(Hooked):
    def configure_optimizers(self) -> Any:
        self.first.weight.register_hook(lambda grad: self.called("hook"))
        self.last.weight.register_post_accumulate_grad_hook(lambda parameter: self.called("accumulated"))
        return super().configure_optimizers()


class Noted(AutoBatchSize):
    """Notes the calls of a whole trial step, and what the search left of them."""

    def on_fit_start(self, run, module):
        module.lists = module.calls
        weights = [p.detach().clone() for p in module.parameters()]
        super().on_fit_start(run, module)
        self.as_before = all(
            torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True)
        ) and (module.calls is module.lists and not module.calls and run.global_step == 0)
        self.flags = all(p.requires_grad and p.grad is None for p in module.parameters())
        self.empty = all(not optimizer.state for optimizer in run.optimizers)


def sizes(folder: str, cases: list[tuple[str, str]]) -> list[Any]:
    warnings.simplefilter("ignore")
    found = []
    for mode, where in cases:
        module = ParameterHooks(600, where=where)
        callback = Noted(mode, margin=0, global_batch_size="largest")
        trainer(folder, callback, devices=2, strategy=strategy_for(2), max_steps=1).fit(module)
        found.append((module.batch_size, callback.as_before, callback.flags, callback.empty))
    return found


def test_memory_that_runs_out_in_any_hook_is_seen(tmp_path):
    cases = [("binsearch", where) for where in [*AUTOMATIC, "hook", "accumulated"]]
    for answer in run_ranks(2, sizes, str(tmp_path), cases, backend=None, timeout=170):
        for case, (size, *clean) in zip(cases, answer, strict=True):
            assert 588 <= size <= 600, case
            assert all(clean), case


class Manual(Hooked):
    """Two optimizers, each toggled while it steps, and no gradient clipping by Lightning."""

    configure_gradient_clipping = None  # type: ignore[assignment]


@pytest.mark.parametrize("where", ["backward", "on_before_optimizer_step"])
def test_several_optimizers_with_manual_optimization(tmp_path, where):
    module = Manual(600, where=where, manual=True)
    callback = Noted("binsearch", margin=0, global_batch_size="largest")
    trainer(tmp_path, callback, max_steps=2).fit(module)
    assert 588 <= module.batch_size <= 600
    assert callback.as_before and callback.flags and callback.empty
    assert module.calls.count("on_before_optimizer_step") == 2


def test_a_gradient_scaler_is_as_before(tmp_path):
    class Scaled(AutoBatchSize):
        def on_fit_start(self, run, module):
            scaler = run.precision_plugin.scaler
            before = (scaler.state_dict(), scaler._scale)
            super().on_fit_start(run, module)
            self.same = (scaler.state_dict(), scaler._scale) == before

    module = Hooked(600, where="optimizer_step")
    callback = Scaled("binsearch", margin=0, global_batch_size="largest")
    from lightning.pytorch.plugins.precision import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    trainer(tmp_path, callback, max_steps=1, plugins=[plugin]).fit(module)
    assert 588 <= module.batch_size <= 600 and callback.same
