"""The rest of the package on ranks under MPI; writes down what each rank saw."""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_lockstep import (
    AutoBatchSize,
    LockstepMPIStrategy,
    OverflowDetector,
    RankOrderedLogging,
    StopTogether,
    SyncedEarlyStopping,
    get_logger,
    set_breakpoint,
)

warnings.simplefilter("ignore")
FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2]
LARGEST = {"global_batch_size": "largest"}
log = get_logger("everything", log_level="INFO")


class Model(LightningModule):
    def __init__(self, do):
        super().__init__()
        self.do, self.batch_size, self.steps = do, 4, []
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        if self.trainer.state.fn == "fit" and len(batch) == self.batch_size:
            self.steps.append((self.current_epoch, batch_idx))
        here = self.global_rank == 1 and batch_idx == 5
        if self.do == "breakpoint" and here:
            set_breakpoint(reason="on purpose")
        if self.do == "breakpoint" and self.trainer.global_step > 5:
            time.sleep(0.1)  # so that few batches pass while the request travels on a busy machine
        if self.do == "preempt" and here:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.do == "logging" and batch_idx == 2 and self.current_epoch == 0:
            log.info("rank %d was here", self.global_rank, main_process_only=False, in_order=True)
        outputs = self.layers(batch)
        if self.do == "overflow" and self.global_rank == 1 and batch_idx == 3:
            outputs = outputs * float("inf")
        loss = outputs.square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)

    def train_dataloader(self):
        rows = 60 + 20 * self.global_rank if self.do == "uneven" else 96
        data = torch.randn(rows, 8, generator=torch.Generator().manual_seed(5))
        return DataLoader(data, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(5)), batch_size=8)


def fit(do, *callbacks, resume=None, **options):
    seed_everything(3, verbose=False)
    model = Model(do)
    folder = FOLDER / do
    trainer = Trainer(
        strategy=LockstepMPIStrategy(grace_period=5.0, **options),
        accelerator="cpu",
        devices="auto",
        max_epochs=4 if do == "early" else 2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        use_distributed_sampler=do != "uneven",
        callbacks=[*callbacks, ModelCheckpoint(folder / "ckpt", save_last=True)],
    )
    trainer.fit(model, ckpt_path=resume)
    weights = [parameter.double().sum().item() for parameter in model.parameters()]
    seen = {"steps": model.steps, "global_step": trainer.global_step, "weights": weights}
    return (
        trainer,
        model,
        {**seen, "batch_size": model.batch_size, "backend": torch.distributed.get_backend()},
    )


def main():
    found = {}
    if WHAT == "preempt":
        fit("preempt", StopTogether())
    elif WHAT == "resume":
        trainer, _, found = fit("resume", resume=str(FOLDER / "preempt" / "ckpt" / "preempted.ckpt"))
    else:
        detector = OverflowDetector(action="skip", report_dir=FOLDER / "reports")
        early = SyncedEarlyStopping("loss", patience=1, min_delta=10.0, check_on_train_epoch_end=True)
        for do, callbacks, options in [
            ("uneven", [], {"uneven_inputs": "join"}),
            ("breakpoint", [StopTogether()], {}),
            ("early", [early], {}),
            ("logging", [RankOrderedLogging()], {}),
            ("batch_size", [AutoBatchSize(max_trials=6, max_val=12, **LARGEST)], {}),
            ("overflow", [detector], {}),
        ]:
            trainer, _, found[do] = fit(do, *callbacks, **options)
        found["overflow"]["skipped"] = detector.skipped_steps
    (FOLDER / f"{WHAT}-{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
