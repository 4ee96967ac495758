"""Searches of AutoBatchSize under DeepSpeed, which tests of several costs run; each function runs in a rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lockstep import AutoBatchSize, EffectiveBatchSize, LockstepDeepSpeedStrategy
from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from tests.models.batch_size.models import FULL, _FailsInBackward, largest
from tests.models.deepspeed import run_config
from tests.models.deepspeed.run_config import loader


class Walled(LightningModule):
    """Fails on one rank with batches of more than 10 samples, in the forward or in the backward."""

    def __init__(self, where: str = "", *, on_rank: int = 1, batch_size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(8, 33), nn.Linear(33, 33), nn.Linear(33, 3)
        self.norm = nn.LayerNorm(33)
        self.tied = self.second  # a layer that is used twice
        self.where, self.on_rank, self.batch_size = where, on_rank, batch_size
        self.losses: list[float] = []
        self.sizes: list[int] = []

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        full = self.trainer.global_rank == self.on_rank and len(inputs) > 10
        hidden = self.tied(self.norm(self.first(inputs).relu()))
        if full and self.where == "forward":
            raise RuntimeError(FULL)
        return self.second(_FailsInBackward.apply(hidden, full and self.where == "backward"))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.last(self.hidden(inputs).relu()).float(), targets)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        self.sizes.append(len(inputs))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(self.last(self.hidden(batch[0]))))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size, 256)

    val_dataloader = train_dataloader


def trainer(strategy: Any, *callbacks: Any, **options: Any) -> Trainer:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # ranks share few cores
    strategy = strategy if isinstance(strategy, LockstepDeepSpeedStrategy) else engine(strategy)
    given = {"max_epochs": None, "max_steps": 4, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    return run_config.trainer(strategy, callbacks=list(callbacks), **given)


def engine(stage: int, **config: Any) -> LockstepDeepSpeedStrategy:
    return LockstepDeepSpeedStrategy(config={"zero_optimization": {"stage": stage}, **config})


# -- a run after a search is one without -----------------------------------------------------------------


#: Stage, where memory runs out in trials, options of the strategy, options of the Trainer.
Run = tuple[int, str, dict[str, Any], dict[str, Any]]
RUNS: list[Run] = [
    (0, "forward", {}, {"accumulate_grad_batches": 2}),
    (1, "backward", {}, {"accumulate_grad_batches": 2}),
    (2, "backward", {}, {"gradient_clip_val": 0.5}),
    (2, "forward", {"offload_optimizer": "cpu", "adapt": True}, {"accumulate_grad_batches": 2}),
    (3, "forward", {}, {"gradient_clip_val": 0.5}),
    (3, "backward", {}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
]


def with_and_without(folder: str, runs: list[Run]) -> list[Any]:
    found = []
    for stage, where, strategy, options in runs:
        callback = largest(margin=0, max_val=24)
        searched = Walled(where)
        run = trainer(LockstepDeepSpeedStrategy(stage=stage, **strategy), callback, default_root_dir=folder, **options)
        run.fit(searched)
        by_hand = Walled(batch_size=searched.batch_size)
        trainer(LockstepDeepSpeedStrategy(stage=stage, **strategy), **options).fit(by_hand)
        config: Any = run.strategy.config
        found.append(
            (
                (stage, where),
                (searched.sizes, by_hand.sizes),
                (searched.losses, by_hand.losses),
                config["train_micro_batch_size_per_gpu"],
                config["train_batch_size"] == 20 * options.get("accumulate_grad_batches", 1),
            )
        )
    return found


def check_runs(found: list[Any]) -> None:
    for name, (sizes, sizes_by_hand), (losses, losses_by_hand), micro, whole_is_right in found:
        assert sizes == sizes_by_hand and losses == losses_by_hand and len(losses) >= 4, name
        assert set(sizes) == {10} and micro == 10 and whole_is_right, name


class Counts(Callback):
    """What the Trainer and the engine know of a run when it ends."""

    found: tuple[int, ...] = ()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        engine = trainer.strategy.model
        self.found = (
            pl_module.batch_size,
            trainer.accumulate_grad_batches,
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            engine.global_steps,
            trainer.global_step,
        )


def other_loops(folder: str) -> list[Any]:
    """Sizes of an evaluation, and what fits keep of the global batch."""
    callback, module = AutoBatchSize(margin=0, max_val=24), Walled("forward")
    trainer(2, callback, limit_val_batches=2, default_root_dir=folder).validate(module, verbose=False)
    fitted, kept = Counts(), Counts()
    callbacks = AutoBatchSize(margin=0, max_val=24), EffectiveBatchSize(64), fitted
    trainer(1, *callbacks, default_root_dir=folder).fit(Walled("backward"))
    trainer(2, AutoBatchSize(margin=0), kept, default_root_dir=folder).fit(Walled("backward", batch_size=16))
    return [module.sizes, fitted.found, kept.found]
