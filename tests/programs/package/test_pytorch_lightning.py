"""A program that uses Lightning by its other name, `pytorch_lightning`."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import run_script

FIT = """
import sys
import torch
import pytorch_lightning as pl
import lightning_lockstep

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Tell(pl.Callback):
    def on_fit_end(self, trainer, net):
        weights = " ".join(f"{value:.6f}" for value in net.layer.weight.flatten().tolist())
        rank, ranks, steps = trainer.global_rank, trainer.world_size, trainer.global_step
        line = f"rank {rank} of {ranks} steps {steps}: {weights}"
        assert "lightning.pytorch" not in sys.modules, "the other family came along"
        sys.stdout.write(line + "\\n")  # in one piece, also where output is not buffered

if __name__ == "__main__":
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="lockstep_ddp", max_epochs=1, callbacks=[Tell()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    assert isinstance(trainer.strategy, pl.strategies.DDPStrategy), "a strategy of the other family"
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=2))
"""


def test_a_fit_on_two_ranks_uses_that_package_alone(tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(FIT)
    done = run_script([script], timeout=120, fresh=True)
    assert (done.returncode, done.leftovers) == (0, ()), done.output
    told = {line.split(":")[0]: line.split(":")[1] for line in done.stdout.splitlines() if "steps" in line}
    assert set(told) == {"rank 0 of 2 steps 6", "rank 1 of 2 steps 6"}, done.output
    assert len(set(told.values())) == 1, "the ranks ended with different weights"
