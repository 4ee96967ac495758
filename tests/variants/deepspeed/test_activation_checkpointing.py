"""Activations that are computed again: the losses stay the same, and less is kept for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep._lightning import LightningModule
from tests.harness import run_ranks
from tests.models.deepspeed.run_config import trainer

BLOCKS, ROWS, WIDTH, HIDDEN = 3, 64, 16, 256
# How a block is called, and the section of the configuration.
CASES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "kept": ("plain", None),
    "on the host": (
        "deepspeed",
        {
            "partition_activations": True,
            "cpu_checkpointing": True,
            "profile": True,
            "synchronize_checkpoint_boundary": True,
        },
    ),
    "contiguous": (
        "deepspeed",
        {
            "partition_activations": True,
            "contiguous_memory_optimization": True,
            "number_checkpoints": BLOCKS,
        },
    ),
}
IN_STAGE_3 = ("kept", "on the host")


class Net(LightningModule):
    """Blocks with far more values inside than between them, and dropout, which must fall alike twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Dropout(0.2), nn.Linear(HIDDEN, WIDTH))
            for _ in range(BLOCKS)
        )
        self.losses: list[float] = []
        self.kept: list[int] = []

    def call(self, block: nn.Module, inputs: Tensor) -> Any:
        import deepspeed

        if self.how == "deepspeed":
            return deepspeed.checkpointing.checkpoint(block, inputs)
        return block(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.profiler.profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profile:
            outputs = self.first(batch[0])
            for block in self.blocks:
                outputs = self.call(block, outputs)
        # Allocated less freed: what is alive for the backward pass.
        self.kept.append(sum(event.self_cpu_memory_usage for event in profile.key_averages()))
        loss: Tensor = (outputs**2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fits() -> dict[str, tuple[list[float], int]]:
    found = {}
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(6 * ROWS, WIDTH, generator=generator)), ROWS)
    for stage in (1, 3):
        for name, (how, section) in CASES.items():
            if stage == 3 and name not in IN_STAGE_3:
                continue
            config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
            if section is not None:
                config["activation_checkpointing"] = section
            net = Net(how)
            torch.manual_seed(1)  # of the dropout
            trainer(config, adapt=False).fit(net, loader)
            found[f"stage {stage}, {name}"] = net.losses, max(net.kept[1:])
    return found


def test_less_is_kept_and_the_losses_are_the_same() -> None:
    for found in run_ranks(2, fits, timeout=200):
        for stage in (1, 3):
            losses, kept = found[f"stage {stage}, kept"]
            assert len(losses) == 3 and losses[-1] < losses[0]
            # What ReLU and dropout keep: at least one tensor of the hidden width for each block.
            assert kept > BLOCKS * ROWS * HIDDEN * 4
            for name in CASES:
                if stage == 3 and name not in IN_STAGE_3:
                    continue
                others, less = found[f"stage {stage}, {name}"]
                assert others == pytest.approx(losses, abs=1e-6), name
                assert name == "kept" or less < kept / 2, (name, less, kept)
