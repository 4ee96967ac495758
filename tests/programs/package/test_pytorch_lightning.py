"""A program that uses Lightning by its other name, `pytorch_lightning`."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_script

FIT = """
import sys
import torch
import pytorch_lightning as pl
import lightning_lockstep

log = lightning_lockstep.get_logger("user", "INFO")

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            log.info("we begin", in_order=True)
        if batch_idx == 2 and self.global_rank == 1:
            lightning_lockstep.set_breakpoint("enough")
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Tell(pl.Callback):
    def on_fit_end(self, trainer, net):
        weights = " ".join(f"{value:.6f}" for value in net.layer.weight.flatten().tolist())
        why = lightning_lockstep.check_breakpoint().reason
        line = f"rank {trainer.global_rank} of {trainer.world_size} left: {trainer.global_step} {why} {weights}"
        assert "lightning.pytorch" not in sys.modules, "the other family came along"
        sys.stdout.write(line + "\\n")  # in one piece, also where output is not buffered

if __name__ == "__main__":
    pl.seed_everything(1)
    ours = [
        lightning_lockstep.StopTogether(),
        lightning_lockstep.SyncedEarlyStopping("loss", patience=1000),
        lightning_lockstep.RankOrderedLogging(),
    ]
    assert isinstance(ours[1], pl.callbacks.EarlyStopping), "a callback of the other family"
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="lockstep_ddp", max_epochs=1, callbacks=[*ours, Tell()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    assert isinstance(trainer.strategy, pl.strategies.DDPStrategy), "a strategy of the other family"
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(400, 4), batch_size=2))
"""


def test_a_fit_on_two_ranks_uses_that_package_alone(tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(FIT)
    done = run_script([script], timeout=120, cwd=tmp_path, fresh=True)
    assert (done.returncode, done.leftovers) == (0, ()), done.output
    told = dict(line.split(" left: ") for line in done.stdout.splitlines() if " left: " in line)
    assert set(told) == {"rank 0 of 2", "rank 1 of 2"}, done.output
    assert len(set(told.values())) == 1, "the ranks ended at the same step with the same weights"
    assert "rank 1: enough" in told["rank 0 of 2"]
    assert ":0-1 user fit.py" in done.stderr and done.stderr.count("we begin") == 1
