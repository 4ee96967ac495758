"""SyncedEarlyStopping in programs that were written for Lightning's callback."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from lightning_lockstep import ConfigurationError, SyncedEarlyStopping
from tests.harness import QUIET

# A fit warns of what other packages deprecate.
pytestmark = pytest.mark.filterwarnings("ignore")


class Own(SyncedEarlyStopping):
    """Stops at the third value, whatever it is."""

    seen: list[float]

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        self.seen = [*getattr(self, "seen", []), float(current)]
        return len(self.seen) == 3, "three are enough"


class Stricter(SyncedEarlyStopping):
    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        stop, reason = super()._evaluate_stopping_criteria(current)
        return stop or float(current) < 0.5, reason or "small enough"


class Falling(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight.sum() * 0

    def on_train_epoch_end(self) -> None:
        self.log("value", 1.0 - 0.2 * self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(callback: EarlyStopping) -> pl.Trainer:
    trainer = pl.Trainer(accelerator="cpu", max_epochs=9, callbacks=[callback], **QUIET)
    trainer.fit(Falling(), torch.utils.data.DataLoader(torch.zeros(2)))
    return trainer


def test_an_overridden_rule_is_asked() -> None:
    own = Own("value")
    trainer = fit(own)
    assert trainer.current_epoch == 3 and own.stopping_reason_message == "three are enough"
    assert own.seen == pytest.approx([1.0, 0.8, 0.6])


def test_an_overridden_rule_may_ask_the_one_below() -> None:
    stricter = Stricter("value", patience=5)
    trainer = fit(stricter)
    assert trainer.current_epoch == 4 and stricter.stopping_reason_message.startswith("Metric value improved")
    assert float(stricter.best_score) == pytest.approx(0.4)


def test_a_subclass_has_a_state_key_of_its_own() -> None:
    assert SyncedEarlyStopping("value").state_key == EarlyStopping("value").state_key
    assert Own("value").state_key == SyncedEarlyStopping("value").state_key.replace("EarlyStopping", "Own")
    pl.Trainer(callbacks=[SyncedEarlyStopping("value"), Own("value")], logger=False, accelerator="cpu")


def test_bad_arguments_are_caught_as_lightnings() -> None:
    with pytest.raises(MisconfigurationException, match="mode"):
        SyncedEarlyStopping("value", mode="mni")
    with pytest.raises(ConfigurationError) as caught:
        SyncedEarlyStopping("value", mode="mni", patience=-1)
    assert len(caught.value.faults) == 2
