"""The user's script of a soak run: ranks fit a small network on CPU; the planned fault happens at batch 5.

python program.py FOLDER

FOLDER holds ``plan.json`` (see plan.py) and takes what the run leaves: ``notes`` (where each rank is, what it raised,
whether it came to the end), ``checkpoints`` and ``run``.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812  (as in most programs)
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

import lightning_lockstep as lockstep
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import BatchSizeError

FOLDER = Path(sys.argv[1])
PLAN: dict[str, Any] = json.loads((FOLDER / "plan.json").read_text())
FAULT, TARGET = PLAN["fault"], PLAN["target"]
AT, BATCHES, STEP = 5, 12, 0.02
GRACE, SILENCE = 3.0, 3.0
# Faults that the program waits for, and of these the ones after which it has to be interrupted in its work.
AWAITED = ("stop", "stop_short", "stranger", "term_rank", "usr1_rank", "term_parent", "usr1_parent")
AWAITED += ("ctrl_c", "ctrl_c_twice")
GOES_ON = ("term_parent", "usr1_parent", "ctrl_c", "ctrl_c_twice")

tempfile.tempdir = None  # of this run, also where the interpreter is a fork


class PrunedError(Exception):
    """What a sweep's pruning callback raises on every rank."""


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.fault, self.reached = FAULT, False

    def at(self, phase: str) -> None:
        """Let the fault happen if it is planned for a phase other than a training step, once, after the checkpoint."""
        has_saved = self.global_step > 4 and not self.trainer.sanity_checking
        if phase == PLAN["phase"] and has_saved and not self.reached:
            self.reached = True
            self.reach_fault(torch.zeros(()))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(STEP)
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.layer(inputs), targets)
        if FAULT in GOES_ON and self.global_step > AT:
            time.sleep(0.2)
        if self.current_epoch == 0 and batch_idx == AT and PLAN["phase"] == "training_step":
            loss = self.reach_fault(loss)
        self.log("loss", loss)
        loss.register_hook(lambda gradient: self.at("backward"))
        return loss

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        self.at("optimizer")
        super().optimizer_step(*args, **options)

    def reach_fault(self, loss: torch.Tensor) -> torch.Tensor:
        note_place(self.global_rank)
        if self.fault in AWAITED:
            wait_for("go")
        elif self.fault in EVERYWHERE:
            EVERYWHERE[self.fault]()
        elif self.global_rank == TARGET and self.fault == "nan":
            return loss * float("nan")
        elif self.global_rank == TARGET and self.fault in ON_TARGET:
            ON_TARGET[self.fault]()
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.layer(inputs), targets)
        self.log("val_loss", loss, sync_dist=True)
        self.at("validation")

    def on_validation_epoch_end(self) -> None:
        self.at("validation_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.at("save")

    def on_train_epoch_end(self) -> None:
        self.at("epoch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        fewer = 4 if FAULT == "uneven" and self.global_rank == TARGET else 0
        return loader(BATCHES - fewer)


def loader(batches: int) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(4 * batches, 8), torch.randint(0, 4, (4 * batches,)))
    return DataLoader(data, batch_size=4)


# ------------------------------------------------------------------ faults


def raise_error() -> None:
    raise ValueError("boom in training_step")


def raise_ours() -> None:
    raise BatchSizeError("nothing fits")


def prune() -> None:
    torch.distributed.barrier()  # the ranks of a sweep agree on it
    raise PrunedError("on every rank")


def run_out_of_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    torch.empty(2**30)


def hold_gil() -> None:
    # A function of a PyDLL is called without releasing the GIL.
    ctypes.PyDLL(None).usleep(int((SILENCE + 1.5) * 1e6))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


EVERYWHERE = {"raise_all": raise_error, "second_fit": prune}
ON_TARGET = {
    "stdout": lambda: print("a line", flush=True),
    "raise": raise_error,
    "stderr_raise": raise_error,
    "ours": raise_ours,
    "exit": lambda: sys.exit(3),
    "kill": kill,
    "memory": run_out_of_memory,
    "slow": lambda: time.sleep(SILENCE + 1.5),
    "holds_gil": hold_gil,
}


def close_stream(descriptor: int) -> None:
    """Let a standard stream be a pipe that nobody reads, as behind ``| head``."""
    if PLAN["launch"] == "mpirun" and "OMPI_COMM_WORLD_RANK" in os.environ:
        return  # the stream of this rank is mpirun's
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, descriptor)
    os.close(writer)


# ------------------------------------------------------------------ notes


def note(name: str, content: str = "") -> None:
    draft = FOLDER / "notes" / f"{name}.draft"
    draft.write_text(content)
    draft.replace(FOLDER / "notes" / name)


def note_place(rank: int) -> None:
    address = "" if PLAN["stock"] else getattr(current_communicator().side_channel, "address", "")
    note(f"{rank}.at", json.dumps([os.getpid(), address]))


def wait_for(name: str) -> None:
    deadline = time.monotonic() + 60
    while not (FOLDER / name).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


class NoteErrors(Callback):
    """Notes what ended the fit of a rank, before anything becomes of it."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        note(f"{trainer.global_rank}.error", "".join(traceback.format_exception(exception)))


# ------------------------------------------------------------------ the run


def callbacks() -> list[Callback]:
    made = {
        "overflow": lambda: lockstep.OverflowDetector(report_dir=FOLDER / "run"),
        "stop": lockstep.StopTogether,
        "early": lambda: lockstep.SyncedEarlyStopping("val_loss", patience=5),
        "logging": lambda: lockstep.RankOrderedLogging(folder=FOLDER / "run"),
    }
    folder = FOLDER / ("file/below" if FAULT == "folder" else "checkpoints")
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    return [NoteErrors(), checkpoint, *(made[name]() for name in PLAN["callbacks"])]


def strategy() -> Any:
    if PLAN["stock"]:
        return {"spawn": "ddp_spawn", "fork": "ddp_fork"}.get(PLAN["launch"], "ddp")
    options = {"uneven_inputs": PLAN["uneven_inputs"], "grace_period": GRACE, "silence_limit": SILENCE}
    if PLAN["launch"] in ("mpirun", "open_mpi", "mpich"):
        return lockstep.LockstepMPIStrategy(**options)
    start = PLAN["launch"] if PLAN["launch"] in ("spawn", "fork") else "popen"
    return lockstep.LockstepDDPStrategy(start_method=start, **options)


def make_trainer() -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1 if PLAN["launch"] == "srun" else PLAN["ranks"],
        num_nodes=PLAN["ranks"] if PLAN["launch"] == "srun" else 1,
        strategy=strategy(),
        max_epochs=2,
        logger=CSVLogger(FOLDER, name="", version="full") if FAULT == "disk" else False,
        callbacks=callbacks(),
        use_distributed_sampler=False,
        default_root_dir=FOLDER / "run",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(net: Net) -> L.Trainer:
    trainer = make_trainer()
    trainer.fit(net, val_dataloaders=loader(1))
    return trainer


def fit_and_catch(net: Net) -> None:
    try:
        fit(net)
    except Exception as error:
        note(f"{name_of_this()}.caught", type(error).__name__)


def name_of_this() -> str:
    if PLAN["launch"] in ("spawn", "fork"):
        return "parent"
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "LOCAL_RANK", "SLURM_PROCID")
    of_parent = "parent" if PLAN["launch"] == "mpirun" else "0"
    return next((os.environ[name] for name in names if name in os.environ), of_parent)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if FAULT in ("stdout", "stderr", "stderr_raise"):
        close_stream(1 if FAULT == "stdout" else 2)
    L.seed_everything(1, verbose=False)
    net = Net()
    try:
        if FAULT == "second_fit":
            fit_and_catch(net)
            time.sleep(GRACE + 1)  # the program works on, for longer than a failure that nobody catches may take
            net.fault = "none"
        fit(net)
        if FAULT == "second_fit":
            net.fault = FAULT
            fit_and_catch(net)
    except BaseException as error:
        note(f"{name_of_this()}.raised", type(error).__name__)
        raise
    note(f"{name_of_this()}.done")


if __name__ == "__main__":
    main()
