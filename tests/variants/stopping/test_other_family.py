"""The same callbacks in a program that imports Lightning as ``pytorch_lightning``."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import run_script

PROGRAM = """
import pytorch_lightning as pl
import torch

import lightning_lockstep as lockstep

log = lockstep.get_logger("user", "INFO")


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.last = -1

    def training_step(self, batch, batch_idx):
        self.last = batch_idx
        if batch_idx == 0:
            log.info("we begin", in_order=True)
        if batch_idx == 5 and self.global_rank == 1:
            lockstep.set_breakpoint("enough")
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


callbacks = [
    lockstep.StopTogether(),
    lockstep.SyncedEarlyStopping("loss", check_every_n_steps=1, patience=1000),
    lockstep.RankOrderedLogging(),
]
assert all(isinstance(callback, pl.Callback) for callback in callbacks)
assert isinstance(callbacks[1], pl.callbacks.EarlyStopping)
module = Module()
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="lockstep_ddp", max_epochs=1, logger=False, callbacks=callbacks,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(torch.ones(400, 4), batch_size=2))
print(f"<rank {trainer.global_rank} left after {module.last}: {lockstep.check_breakpoint().reason}>", flush=True)
"""


def test_the_callbacks_belong_to_the_family_of_the_program(tmp_path):
    program = Path(tmp_path, "program.py")
    program.write_text(PROGRAM)
    done = run_script([program], timeout=90, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.output
    left = {line for line in done.output.replace("><", ">\n<").splitlines() if "left after" in line}
    last = {line.split("left after ")[1].split(":")[0] for line in left}
    assert len(left) == 2 and len(last) == 1 and all("rank 1: enough" in line for line in left), done.output
    assert ":0-1 user program.py" in done.stderr and done.stderr.count("we begin") == 1
