"""A metric that nobody logs is a fault as soon as that can be known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_lockstep import ConfigurationError
from lightning_lockstep._application.run import RunRecord, _misspelt, _monitored
from lightning_lockstep._lightning import LightningModule, Trainer


class Logs(LightningModule):
    """Logs a loss of training and one of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.steps = 0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.steps += 1
        loss = self.layer(batch).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.layer(batch).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 2), 2)

    val_dataloader = train_dataloader


def fit(module: Logs, metric: str | None, tmp_path: Path, *, checkpoint: bool = True) -> None:
    best = {"monitor": metric, "save_on_train_epoch_end": False}
    config = OmegaConf.create(
        {"objective": {"metric": metric}, "checkpoint": {"best": best} if checkpoint else {}}
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=1,
        callbacks=[RunRecord(metric, _monitored(config))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers", "ignore:.*LeafSpec")
@pytest.mark.parametrize(
    ("metric", "steps", "hint"),
    [
        ("val_los", 0, " Did you mean 'val_loss'?"),
        ("Val/Loss", 0, " Did you mean 'val_loss'?"),
        ("accuracy", 4, ""),
    ],
)
def test_a_misspelt_metric_ends_a_run_before_its_first_step_and_any_other_at_the_first_validation(
    metric: str, steps: int, hint: str, tmp_path: Path
) -> None:
    module = Logs()
    with pytest.raises(ConfigurationError) as caught:
        fit(module, metric, tmp_path)
    assert f"objective.metric={metric}: validation has logged no such metric.{hint} There is: " in str(
        caught.value
    )
    assert module.steps == steps


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers", "ignore:.*LeafSpec")
@pytest.mark.parametrize("metric", ["val_loss", "train_loss"])
def test_a_metric_of_validation_or_of_training_is_none(metric: str, tmp_path: Path) -> None:
    module = Logs()
    fit(module, metric, tmp_path)
    fit(module, "logged_by_nobody", tmp_path, checkpoint=False)  # only a sweeper asks for it
    fit(module, None, tmp_path)
    assert module.steps == 12


@pytest.mark.parametrize(
    ("name", "logged", "expected"),
    [
        ("val_los", "val_loss", True),
        ("val_lsos", "val_loss", True),
        ("val/loss", "val_loss", True),
        ("val_loss", "train_loss", False),
        ("val/f1_score_macro", "train/f1_score_macro", False),
        ("val_acc", "val_auc", False),
        ("val_top10", "val_top1", False),
        ("loss", "val_loss", False),
    ],
)
def test_only_another_spelling_of_the_same_name_is_taken_for_a_slip(
    name: str, logged: str, expected: bool
) -> None:
    assert _misspelt(name, [logged]) is expected
