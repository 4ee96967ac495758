"""A day in which no rank says a word to another one, with a clock that runs fast: nobody is taken for lost or stuck."""

from __future__ import annotations

import time
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.distributed import current_communicator
from tests.harness import run_ranks

SECONDS = 6.0  # longer than the silence limit below, which libzmq counts in true seconds
DAY = 24 * 3600.0


class Quiet(L.LightningModule):
    """Before its third step each rank sleeps for what its clock takes for a day."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if index == 2:
            started, real = time.monotonic(), time.monotonic
            with patch.object(time, "monotonic", lambda: started + (real() - started) * DAY / SECONDS):
                time.sleep(SECONDS)
            patch.object(time, "monotonic", lambda: real() + DAY).start()  # a clock never goes back
            assert time.monotonic() - started >= DAY
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def a_quiet_day() -> tuple[int, bool, list[int]]:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        strategy=LockstepDDPStrategy(silence_limit=3, stall_timeout=60),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        **dict.fromkeys(off, False),
    )
    trainer.fit(Quiet(), DataLoader(TensorDataset(torch.ones(32, 2)), 4))
    failed = trainer.strategy.supervisor.propagation.failed
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    assert int(total) == 3
    return trainer.global_step, failed, current_communicator().gather(trainer.global_step)


def test_a_day_of_silence_ends_nothing() -> None:
    assert run_ranks(2, a_quiet_day, backend=None, timeout=120) == [(4, False, [4, 4])] * 2
