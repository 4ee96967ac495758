"""What AutoBatchSize and EffectiveBatchSize refuse, each with one clear error."""

from __future__ import annotations

import types

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from lightning_lockstep import AutoBatchSize, EffectiveBatchSize
from lightning_lockstep.errors import BatchSizeError, ConfigurationError
from tests.models.batch_size.models import FromLoader, PassedIn, Walled, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.allow_leaks("env:POPULATE", "env"),
]


class NoUse(Walled):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(100, 20)), batch_size=7)


def bad(case: str):
    data = TensorDataset(torch.randn(64, 20))
    loader = DataLoader(data, batch_size=4)
    if case == "unused":
        return AutoBatchSize(), NoUse(), None, "was made with batch_size=7"
    if case == "batch sampler":
        own = DataLoader(data, batch_sampler=type("Own", (BatchSampler,), {"__len__": None})(range(64), 4, False))
        return AutoBatchSize(), PassedIn(), own, "its own batch sampler"
    if case == "not a loader":
        return AutoBatchSize(), PassedIn(), [torch.randn(2, 20)], "Tensor cannot be changed"
    return AutoBatchSize(), FromLoader(), loader, ""


@pytest.mark.parametrize("case", ["unused", "batch sampler", "not a loader"])
def test_bad_input_is_one_clear_error(tmp_path, case):
    callback, module, loader, text = bad(case)
    with pytest.raises(BatchSizeError, match=text):
        trainer(tmp_path, callback).fit(module, loader)


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAStrategy"])
@pytest.mark.parametrize("settings", [{}, {"mode": "off", "on_oom": "split"}])
def test_a_strategy_in_which_a_trial_is_not_the_step_is_refused_before_any(name, settings):
    strategy = object.__new__(getattr(pl.strategies, name))
    if name == "XLAStrategy":
        strategy.__class__ = type("XLAStrategy", (pl.strategies.DDPStrategy,), {"root_device": torch.device("xla")})
    run = types.SimpleNamespace(strategy=strategy, fast_dev_run=False)
    with pytest.raises(BatchSizeError, match=f"{name}: it (divides the model|compiles and runs)"):
        AutoBatchSize(**settings).on_fit_start(run, Walled())


def test_a_bug_surfaces_at_once_and_a_module_without_size_is_fine(tmp_path):
    class Wrong(Walled):
        def training_step(self, batch, batch_idx):
            return self.last(batch[0]).mean()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer(tmp_path, AutoBatchSize()).fit(Wrong())
    callback, module, loader, _ = bad("fine")
    trainer(tmp_path, callback).fit(module, loader)
    assert callback.result.size == 4


def test_bad_arguments_are_told_all_at_once():
    with pytest.raises(ConfigurationError) as raised:
        AutoBatchSize("fast", margin=1.5, init_val=0, on_oom="pray", memory_limit="much", steps_per_trial=True)
    assert len(raised.value.faults) == 6
    with pytest.raises(TypeError, match="unexpected keyword argument 'margn'"):
        AutoBatchSize(margn=0.1)
    with pytest.raises(ConfigurationError) as raised:
        EffectiveBatchSize(0, lr_scaling="cubic")
    assert len(raised.value.faults) == 2
