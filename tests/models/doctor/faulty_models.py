"""Models for runs whose folders the doctor reads."""

from __future__ import annotations

import time
from typing import Any

from lightning_lockstep.demo import ByteGPT


class Stalls(ByteGPT):
    """Rank 1 sleeps in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            time.sleep(600)
        return super().training_step(batch, batch_idx)


class Raises(ByteGPT):
    """Cannot be made."""

    def __init__(self, **settings: Any) -> None:
        raise RuntimeError("no file of weights")
