"""Stop it with `kill -TERM` at any batch (exit code 75), start it again: both ranks go on with the next batch."""

import time
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_lockstep import StopTogether


class Module(BoringModel):
    def training_step(self, batch, batch_idx):
        print(f"rank {self.global_rank}: epoch {self.current_epoch}, batch {batch_idx}", flush=True)
        time.sleep(0.2)
        return super().training_step(batch, batch_idx)


saved = Path("runs/resume/checkpoints/preempted.ckpt")
options = {"accelerator": "cpu", "devices": 2, "strategy": "lockstep_ddp", "max_epochs": 2, "logger": False}
trainer = Trainer(**options, default_root_dir="runs/resume", callbacks=[StopTogether()], enable_progress_bar=False)
trainer.fit(Module(), ckpt_path=saved if saved.exists() else None)
