"""Models for runs whose folders the doctor reads."""

from __future__ import annotations

import time
from typing import Any

import torch

from lightning_lockstep.demo import ByteGPT


class Stalls(ByteGPT):
    """Rank 1 sleeps in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            time.sleep(600)
        return super().training_step(batch, batch_idx)


class AsksForTooMuch(ByteGPT):
    """Rank 1 asks for more memory than any machine has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            torch.empty(2**55, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)
