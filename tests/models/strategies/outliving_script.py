"""A fit of four ranks, some of which kill themselves, and what it leaves.

python outliving_script.py FOLDER ON_LOST_RANK [MEMBER:PHASE:STEP ...]

Each rank writes a journal: the samples of each optimizer step, the value of each validation, and that it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from inspect import BoundArguments
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_lockstep as lockstep
from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.distributed.failure.members import Membership, current_membership
from lightning_lockstep.strategies.outliving.recovery import Recovery
from lightning_lockstep.strategies.startup import OutlivingStartup, RankStartup

FOLDER = Path(sys.argv[1])
# The number of this process among those that were started, which stays if others are lost.
MEMBER = os.environ.get("LOCKSTEP_RANK_MEMBER", os.environ.get("LOCAL_RANK", "0"))
ORDERS = [order.split(":") for order in sys.argv[3:]]
RANKS, SAMPLES = 4, 203


def die(phase: str, step: int) -> None:
    if [MEMBER, phase, str(step)] in ORDERS:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def wait_for_newcomer(step: int) -> None:
    """Wait until a process that was started after a loss has reached the Trainer."""
    membership = current_membership()
    for member, phase, when in ORDERS if membership is not None else ():
        while phase == "joins" and int(when) == step and not membership._store.check([f"waits/{member}"]):
            time.sleep(0.02)


def come_late(spares: int) -> None:
    """Wait, in a process that was started after a loss, until the others have made the step before they wait for it."""
    for _, phase, when in ORDERS if int(MEMBER) >= RANKS + spares else ():
        line = f'"step": {int(when) - 1},'
        while phase == "joins" and not any(line in one.read_text() for one in FOLDER.glob("journal.*")):
            time.sleep(0.02)


def note(**what: Any) -> None:
    with (FOLDER / f"journal.{MEMBER}").open("a") as file:
        file.write(json.dumps({"time": time.time(), **what}) + "\n")


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Samples that say which they are."""

    def __init__(self, samples: int, seed: int) -> None:
        self.inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
        self.targets = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[number], self.targets[number], number


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 2)
        with_all = "with_all" in os.environ.get("OPTIONS", "")
        middle = (torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2)) if with_all else ()
        self.middle = torch.nn.Sequential(torch.nn.Tanh(), *middle)
        self.register_buffer("batches", torch.zeros(()))
        self.seen: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        scores = self.last(self.middle(self.first(batch[0])))
        if scores.requires_grad:
            step = self.trainer.global_step
            scores.register_hook(lambda gradient: die("backward", step))
        return torch.nn.functional.cross_entropy(scores, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        wait_for_newcomer(self.trainer.global_step)
        begins = batch_idx % self.trainer.accumulate_grad_batches == 0
        self.seen = batch[2].tolist() if begins else self.seen + batch[2].tolist()
        self.batches += begins
        loss = self.loss(batch)
        die("forward", self.trainer.global_step)
        if generation() > 0:
            die("again", self.trainer.global_step)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        step = self.trainer.global_step
        note(step=step, seen=self.seen, rank=self.global_rank, ranks=self.trainer.world_size)
        die("optimizer", step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            die("sanity" if self.trainer.sanity_checking else "validation", self.trainer.global_step)
        self.log("val_loss", self.loss(batch))

    def on_validation_end(self) -> None:
        die("validation_end", self.trainer.global_step)
        if not self.trainer.sanity_checking:
            note(validated=self.trainer.global_step, value=float(self.trainer.callback_metrics["val_loss"]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.state.status != "interrupted":
            die("save", self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        die("epoch_end", self.trainer.global_step)

    def on_train_end(self) -> None:
        die("train_end", self.trainer.global_step)

    def on_train_start(self) -> None:
        note(
            starts=self.trainer.world_size,
            eval=[name for name, one in self.named_modules() if not one.training],
        )
        if ["all", "raise", str(self.trainer.global_step)] in ORDERS and MEMBER == "1":
            raise ValueError("boom")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8), "interval": "step"}]


def generation() -> int:
    membership = current_membership()
    return 0 if membership is None else membership.current.number


class DyingRecovery(Recovery):
    """Dies while the ranks share a state."""

    def share_state(self, call: BoundArguments) -> None:
        die("recovery", generation())
        super().share_state(call)


class DyingStartup(OutlivingStartup):
    def recovery(self, strategy: Any, membership: Membership, trainer: Any) -> Recovery:
        self._recovery = self._recovery or DyingRecovery(strategy, membership)
        return super().recovery(strategy, membership, trainer)


class Dying(LockstepDDPStrategy):
    """Its ranks may die at other places than in a step."""

    def make_startup(self) -> RankStartup:
        is_outlived = isinstance(super().make_startup(), OutlivingStartup)
        return DyingStartup(None) if is_outlived else super().make_startup()

    def setup_environment(self) -> None:
        die("connect", generation())
        super().setup_environment()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    L.seed_everything(5, verbose=False)
    callbacks: list[Any] = [
        ModelCheckpoint(FOLDER / "best", monitor="val_loss", save_top_k=2, filename="{epoch}", save_last=True),
        ModelCheckpoint(FOLDER / "steps", every_n_train_steps=5, save_top_k=-1, filename="{step}"),
        EarlyStopping("val_loss", patience=50),
    ]
    options: dict[str, Any] = json.loads(os.environ.get("OPTIONS", "{}"))
    loggers: list[Any] = [CSVLogger(FOLDER, name="csv")]
    if options.pop("with_all", False):
        loggers.append(TensorBoardLogger(FOLDER, name="tensorboard"))
        callbacks += [
            lockstep.ReplicaCheck(every_n_steps=3, audit_every_n_steps=6),
            lockstep.OverflowDetector(check_every_n_steps=1),
            lockstep.StragglerMonitor(every_n_steps=5),
            lockstep.RankOrderedLogging(folder=FOLDER / "logs"),
            lockstep.StopTogether(),
            lockstep.SyncedEarlyStopping("val_loss", mode="max", patience=50),
        ]
    if global_batch := options.pop("global_batch", None):
        callbacks.append(lockstep.EffectiveBatchSize(global_batch))
    names = ("least_ranks", "spares", "random_numbers", "batch_norm", "guard")
    come_late(options.get("spares", 0))
    of_strategy = {name: options.pop(name) for name in names if name in options}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS // options.get("num_nodes", 1),
        strategy=Dying(on_lost_rank=sys.argv[2], **of_strategy),
        logger=loggers,
        callbacks=callbacks,
        default_root_dir=FOLDER,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, **options},
    )
    net, data = Net(), Numbered(SAMPLES, 3)
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=int(os.environ.get("WORKERS", "0")))
    trainer.fit(net, loader, DataLoader(Numbered(37, 4), batch_size=4))
    note(ended=trainer.global_step, training=net.training)
    torch.save(net.state_dict(), FOLDER / f"final.{MEMBER}.pt")


if __name__ == "__main__":
    main()
