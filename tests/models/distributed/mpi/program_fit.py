"""A small fit with checkpoints, early stopping and precision; writes what came of it; maybe a second one that fails."""

import argparse
import hashlib
import json
import os
import signal
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_lockstep import LockstepMPIStrategy

warnings.simplefilter("ignore")


class Model(LightningModule):
    def __init__(self, given, fault=None):
        super().__init__()
        self.given, self.fault = given, fault
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        if self.given.slow:
            time.sleep(0.1)
        if batch_idx == 3 and self.global_rank == 0:
            print("TRAINING", flush=True)
        if batch_idx == 3 and self.global_rank == 1 and self.fault == "raise":
            raise ValueError("a bad batch on purpose")
        if batch_idx == 3 and self.global_rank == 1 and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.layers(batch).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(given, fault=None):
    seed_everything(3, verbose=False)
    strategy = LockstepMPIStrategy(
        backend=given.backend, hostfile=given.hostfile, ssh_args=given.ssh.split(), grace_period=5.0
    )
    model = Model(given, fault)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=given.devices if given.devices == "auto" else int(given.devices),
        num_nodes=given.nodes,
        max_epochs=given.epochs,
        precision=given.precision,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(Path(given.folder) / "ckpt", monitor="val_loss"),
            EarlyStopping("val_loss", patience=5),
        ],
    )
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
    trainer.fit(model, DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))
    return trainer, model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--then", choices=("raise", "kill"), help="what rank 1 does in a second fit")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--hostfile")
    parser.add_argument("--ssh", default="")
    given = parser.parse_args()
    trainer, model = fit(given)
    found = {
        "losses": model.losses,
        "world": trainer.world_size,
        "rank": trainer.global_rank,
        "node": trainer.node_rank,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "weights": model.layers[0].weight.double().sum().item(),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "token": hashlib.sha256(os.environ.get("LOCKSTEP_JOB_TOKEN", "none").encode()).hexdigest(),
        "threads": torch.get_num_threads(),
        "best": os.path.basename(trainer.checkpoint_callback.best_model_path),
    }
    Path(given.folder, f"{trainer.global_rank}.json").write_text(json.dumps(found))
    if given.then:
        fit(given, given.then)


if __name__ == "__main__":
    main()
