"""Models with experts of DeepSpeed: DeepSpeed itself resumes them, on as many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import ConfigurationError, LockstepDeepSpeedStrategy
from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.deepspeed.checkpoints.resuming import writers_differ
from lightning_lockstep.distributed.coordination.communicator import SingleProcessCommunicator
from tests.helpers import run_ranks


class Experts(LightningModule):
    """Two experts, one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        from deepspeed.moe.layer import MoE

        if not hasattr(self, "experts"):
            self.experts = MoE(16, torch.nn.Linear(16, 16), num_experts=2, ep_size=2, use_rts=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs, extra, _ = self.experts(self.first(batch[0]))
        loss = torch.nn.functional.cross_entropy(self.last(outputs), batch[1]) + 0.01 * extra
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        groups = split({"params": list(self.parameters()), "name": "all"})
        return torch.optim.AdamW(groups, 0.02)


def fit(epochs: int, **options: Any) -> tuple[Experts, Trainer]:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    net = Experts()
    trainer = Trainer(
        strategy=LockstepDeepSpeedStrategy(stage=1),
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), 8), **options)
    return net, trainer


def go_on(folder: str) -> Any:
    straight, _ = fit(2)
    _, trainer = fit(1)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    resumed, _ = fit(2, ckpt_path=f"{folder}/last.ckpt")
    return straight.losses[4:], resumed.losses


def test_a_fit_with_experts_goes_on(tmp_path: Path) -> None:
    for straight, resumed in run_ranks(2, go_on, str(tmp_path), timeout=120):
        assert len(resumed) == 4 and resumed == pytest.approx(straight, abs=1e-6)
    with pytest.raises(
        ConfigurationError, match=r"with experts of DeepSpeed, written by 2 ranks, and this run has 1"
    ):
        writers_differ(tmp_path / "last.ckpt", SingleProcessCommunicator(), stage=1, half=None)
