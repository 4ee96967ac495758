"""The program of the topic `recovery`, 200 steps of a network of 1.1 M parameters by default: MODE FOLDER

MODE: ``ours`` (the others go on), ``torchrun`` (all begin again at a checkpoint of every 50 steps) or ``torchft``, for
which four processes are started one by one. KILLS in the environment says who dies in which step: ``2@60,0@130``, WHERE
at which place of it (``forward``, ``backward``, or ``queued``: behind the call of the optimizer's step), WIDTH how wide
the network is. On a GPU, which all ranks share, the refusal of such a device is taken away.
FOLDER takes a line for each step (time, step, loss of the same 128 samples), the time at which each one died, and the
weights at the end.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.strategies import startup
from tests.harness import chosen_device, on_device

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
KILLS = os.environ.get("KILLS", "").split(",")
WHERE = os.environ.get("WHERE", "forward")
WIDTH = int(os.environ.get("WIDTH", "1024"))
RANKS, EPOCHS, BATCH = 4, 4, 8
torch.manual_seed(1)
INPUTS = torch.randn(50 * RANKS * BATCH, 64)
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True).div(8).sin())
NET = torch.nn.Sequential(
    torch.nn.Linear(64, WIDTH),
    torch.nn.Tanh(),
    torch.nn.Linear(WIDTH, WIDTH),
    torch.nn.Tanh(),
    torch.nn.Linear(WIDTH, 1),
)


def die_if_asked(rank: str, step: int, where: str = "forward") -> None:
    died = FOLDER / f"{rank}@{step}"
    if where == WHERE and died.name in KILLS and not died.exists():
        died.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def note(step: int) -> None:
    device = next(NET.parameters()).device
    inputs, targets = (tensor[:128].to(device) for tensor in DATA.tensors)
    with torch.no_grad(), open(FOLDER / "steps", "a") as lines:
        print(time.time(), step, mse_loss(NET(inputs), targets).item(), file=lines)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = NET

    def training_step(self, batch, index):
        rank, step = os.environ["LOCAL_RANK"], self.trainer.global_step
        die_if_asked(rank, step)
        outputs = self.net(batch[0])
        outputs.register_hook(lambda _: die_if_asked(rank, step, "backward"))
        return mse_loss(outputs, batch[1])

    def optimizer_step(self, *given):
        step = self.trainer.global_step
        super().optimizer_step(*given)
        die_if_asked(os.environ["LOCAL_RANK"], step, "queued")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Notes(Callback):
    noted = 0

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step > self.noted:  # it may have been a micro-batch
            self.noted = trainer.global_step
            if trainer.is_global_zero:
                note(trainer.global_step)


def with_lightning() -> bool:
    """Fit; return whether this rank is to save the weights."""
    if chosen_device() == "cuda":
        startup.check_start = lambda strategy: None
    ours, callbacks = MODE == "ours", [Notes()]
    if not ours:
        callbacks.append(ModelCheckpoint(FOLDER, filename="{step}", every_n_train_steps=50, save_last=True))
    trainer = Trainer(
        **on_device(RANKS),
        strategy=LockstepDDPStrategy(on_lost_rank="continue") if ours else "ddp",
        max_epochs=EPOCHS,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=not ours,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = FOLDER / "last.ckpt"
    trainer.fit(Module(), DataLoader(DATA, BATCH, shuffle=True), ckpt_path=saved if saved.exists() else None)
    return trainer.is_global_zero


def with_torchft() -> bool:
    """Train as in torchft's example; return whether this rank is to save the weights."""
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    rank = os.environ["REPLICA_GROUP_ID"]

    def load(state) -> None:
        NET.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"net": NET.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"rank{rank}_",
        timeout=timedelta(seconds=30),
    )
    sampler = DistributedSampler(
        DATA, replica_rank=int(rank), num_replica_groups=RANKS, group_rank=0, num_replicas=1, shuffle=True
    )
    model = DistributedDataParallel(manager, NET)
    optimizer = Optimizer(manager, torch.optim.AdamW(NET.parameters(), 1e-4))
    epoch = 0
    while manager.current_step() < 50 * EPOCHS:
        sampler.set_epoch(epoch)
        epoch += 1
        for inputs, targets in DataLoader(DATA, BATCH, sampler=sampler):
            if manager.current_step() >= 50 * EPOCHS:
                break
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            die_if_asked(rank, manager.current_step())
            loss.backward()
            optimizer.step()
            if manager.participating_rank() == 0:
                note(manager.current_step())
    saves = manager.participating_rank() == 0
    manager.shutdown(wait=False)
    return saves


if __name__ == "__main__":
    if with_torchft() if MODE == "torchft" else with_lightning():
        torch.save(NET.state_dict(), FOLDER / "weights.pt")
