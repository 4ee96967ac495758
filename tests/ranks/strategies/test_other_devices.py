"""LockstepDDPStrategy on a type of device that neither torch nor Lightning knows, such as ``tpu`` of torch_tpu."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from torch.utils.backend_registration import rename_privateuse1_backend

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.distributed import current_communicator
from tests.harness import run_ranks


class Tpus(Accelerator):
    """As an accelerator for torch_tpu would be, but for what only such a device can do."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def name() -> str:
        return "tpus"

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("tpu", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 2

    @staticmethod
    def is_available() -> bool:
        return True


def on_tpu(with_backend: bool) -> dict[str, Any]:
    """Give torch a type of device, without a device behind it, and set ranks up on it."""
    rename_privateuse1_backend("tpu")
    module: Any = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )
    torch._register_device_module("tpu", module)
    if with_backend:
        dist.Backend.register_backend("tpu_backend", dist.ProcessGroupGloo, devices=["tpu", "cpu"])
    strategy = LockstepDDPStrategy(timeout=timedelta(seconds=60))
    trainer = L.Trainer(accelerator=Tpus(), devices=2, strategy=strategy, precision="bf16-mixed", logger=False)
    strategy.setup_environment()
    with trainer.precision_plugin.forward_context():
        return {
            "device": str(strategy.root_device),
            "backend": dist.get_backend(),
            "devices of DDP": strategy.determine_ddp_device_ids(),
            "autocast casts": torch.is_autocast_enabled("tpu"),
            "sum": float(current_communicator().all_reduce(torch.ones(()), "sum")),
        }


@pytest.mark.parametrize(("with_backend", "backend"), [(True, "tpu_backend"), (False, "gloo")])
def test_ranks_on_another_type_of_device(with_backend: bool, backend: str) -> None:
    found = run_ranks(2, on_tpu, with_backend, timeout=60, backend=None)
    for rank, one in enumerate(found):
        assert one == {
            "device": f"tpu:{rank}",
            "backend": backend,
            "devices of DDP": [rank],
            "autocast casts": True,
            "sum": 2.0,
        }
