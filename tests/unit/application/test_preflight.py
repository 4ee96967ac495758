"""`debug=preflight`: the checks for the chosen strategy, before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_lockstep._application.checks import checks_for

TARGETS = {
    "ddp": "lightning_lockstep.LockstepDDPStrategy",
    "mpi": "lightning_lockstep.LockstepMPIStrategy",
    "deepspeed_stage_2": "lightning_lockstep.LockstepDeepSpeedStrategy",
    "xla": "lightning_lockstep.LockstepXLAStrategy",
    "xla_spmd": "lightning_lockstep.LockstepXLASPMDStrategy",
    "single": "lightning_lockstep.components.strategy_name",
}


@pytest.mark.parametrize(
    ("strategy", "devices", "accelerator", "expected"),
    [
        ("ddp", 2, "cpu", ("packages", "kernel", "network")),
        ("mpi", 2, "cpu", ("packages", "kernel", "mpi", "network")),
        ("xla", 2, "cpu", ("packages", "kernel", "xla", "network")),
        ("deepspeed_stage_2", 1, "gpu", ("packages", "kernel", "cuda", "devices", "deepspeed")),
        ("xla_spmd", 2, "tpu", ("packages", "kernel", "xla")),
        ("single", 1, "cpu", ("packages", "kernel")),
        ("ddp", "auto", "cpu", ("packages", "kernel")),
        ("ddp", -1, "auto", ("packages", "kernel", "cuda", "devices", "network")),
        ("ddp", [0, 2], "gpu", ("packages", "kernel", "cuda", "devices", "network")),
        ("ddp", [1], "gpu", ("packages", "kernel", "cuda", "devices")),
    ],
)
def test_the_checks_follow_the_strategy_and_the_devices(
    strategy: str,
    devices: Any,
    accelerator: str,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = OmegaConf.create(
        {
            "strategy": {"_target_": TARGETS[strategy], "hostfile": None},
            "trainer": {"devices": devices, "accelerator": accelerator},
            "hydra": {"runtime": {"choices": {"strategy": strategy}}},
        }
    )
    assert checks_for(config)[0] == expected
