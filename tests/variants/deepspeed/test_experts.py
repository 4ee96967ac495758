"""Models with experts of DeepSpeed: DeepSpeed itself resumes them, on as many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep import ConfigurationError
from lightning_lockstep._lightning import LightningModule, Trainer
from tests.harness import run_ranks
from tests.models.deepspeed.run_config import loader, trainer


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


class Turned(Experts):
    """Its optimizer has the parameters of each group in the opposite order."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        for group in optimizer.param_groups:
            group["params"].reverse()
        return optimizer


def fit(epochs: int, *, net: Experts | None = None, **options: Any) -> tuple[Experts, Trainer]:
    net, runner = net or Experts(), trainer({"zero_optimization": {"stage": 1}}, max_epochs=epochs)
    runner.fit(net, loader(), **options)
    return net, runner


def go_on(folder: str) -> Any:
    straight, _ = fit(2)
    _, runner = fit(1)
    runner.save_checkpoint(f"{folder}/last.ckpt")
    resumed, _ = fit(2, ckpt_path=f"{folder}/last.ckpt")
    try:
        fit(2, ckpt_path=f"{folder}/last.ckpt", net=Turned())
    except ConfigurationError as error:
        return straight.losses[4:], resumed.losses, str(error)
    return straight.losses[4:], resumed.losses, "no error"


def test_a_fit_with_experts_goes_on(tmp_path: Path) -> None:
    for straight, resumed, refused in run_ranks(2, go_on, str(tmp_path), timeout=120):
        assert len(resumed) == 4 and resumed == pytest.approx(straight, abs=1e-6)
        assert "the model has experts of DeepSpeed, so that DeepSpeed goes on by the order of the values" in refused
        assert refused.endswith("expected the same order of parameters in the optimizer.")
