"""A program of two ranks of ``LockstepXLAStrategy``: ``python -m tests.environments.xla.two_ranks CASE FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_lockstep import LockstepXLAStrategy
from lightning_lockstep.distributed import current_communicator
from tests.environments.xla import digits
from tests.environments.xla.digits import Classifier, loaders
from tests.environments.xla.host_runtime import use_host_runtime

GLOBAL_BATCH = 64


def data(rank: int = 0, ranks: int = 1) -> DataLoader[Any]:
    """Four global batches of digits, or a rank's part of each."""
    samples: Any = loaders()[0].dataset
    parts = (one[: 4 * GLOBAL_BATCH][rank::ranks] for one in samples.tensors)
    return DataLoader(TensorDataset(*parts), GLOBAL_BATCH // ranks)


def trainer(folder: Path, strategy: Any = None, **options: Any) -> L.Trainer:
    strategy = strategy or LockstepXLAStrategy(grace_period=8.0, timeout=100.0)
    return digits.trainer(folder, strategy, **{"devices": 2, "use_distributed_sampler": False, **options})


class Module(Classifier):
    """Uses one parameter on rank 1 only, and another nowhere; logs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.of_rank_1 = torch.nn.Parameter(torch.ones(3))
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.mean = MeanMetric()
        self.batches = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.batches += 1
        loss = super().training_step(batch, batch_idx)
        if self.trainer.world_size > 1:
            rank = self.global_rank
            self.mean.update(torch.tensor(float(rank), device=self.device))
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            self.log("rank", float(rank), on_step=False, on_epoch=True, sync_dist=True)
        if self.trainer.world_size == 1 or self.global_rank == 1:
            # Alone as much as two ranks give on average, of which one gives nothing.
            loss = loss + self.of_rank_1.sum() * (1.0 if self.trainer.world_size > 1 else 0.5)
        return loss


class Between(L.Callback):
    """Tries, within a run, what ranks say to each other."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy, rank, device = trainer.strategy, trainer.global_rank, module.device
        note = self.found
        note["device"] = str(device.type)
        sent = {
            "int64": torch.tensor([2**53 + 1, -1]),
            "float64": torch.tensor(1 / 3, dtype=torch.float64),
            "bf16": torch.full((2, 2), 3.140625, dtype=torch.bfloat16),
            "on device": torch.arange(3, device=device) + 7,
            "text": "word",
        }
        got = strategy.broadcast(sent if rank == 0 else None)
        note["broadcast"] = [f"{one.dtype} {one.device.type} {one.tolist()}" for one in list(got.values())[:4]]
        note["tensor"] = strategy.broadcast(torch.tensor(rank + 5, device=device), 1).tolist()
        mine = torch.tensor([rank + 1], device=device)
        note["reduced"] = [strategy.reduce(mine, reduce_op=op).tolist() for op in ("sum", "mean", "min", "max")]
        note["gathered"] = strategy.all_gather(mine).tolist()
        note["gathered on the CPU"] = strategy.all_gather(mine.cpu()).tolist()
        leaf = torch.tensor([1.0 + rank], device=device, requires_grad=True)
        (strategy.all_gather(leaf, sync_grads=True)[:, 0] * torch.tensor([1.0, 10.0], device=device)).sum().backward()
        note["gradient"] = [] if leaf.grad is None else leaf.grad.tolist()
        note["votes"] = [strategy.reduce_boolean_decision(rank == 1, all=every) for every in (True, False)]


def train(folder: Path) -> None:
    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.manual_seed(rank + 1)  # the weights of rank 0 hold
    module, between = Module(), Between()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    first = trainer(folder, callbacks=[between], enable_checkpointing=True)
    first.fit(module, data(rank, 2))
    found = between.found
    found["logged"] = [float(first.callback_metrics[name]) for name in ("mean", "rank")]
    found["unused has a gradient"] = module.unused.grad is not None
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    path = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    third = trainer(folder / "resumed", max_epochs=3)
    resumed = Module()
    third.fit(resumed, data(rank, 2), ckpt_path=path)
    found["resumed"] = [third.global_step, resumed.batches]
    everyone = current_communicator().gather({name: value.tolist() for name, value in resumed.state_dict().items()})
    found["same weights"] = all(one == everyone[0] for one in everyone)
    if rank == 0:
        found["as alone"] = alone(folder, start, weights)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def alone(folder: Path, start: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return how far the weights are from those of one CPU process on whole batches."""
    module = Module()
    module.load_state_dict(start)
    trainer(folder, devices=1, strategy="auto").fit(module, data())
    ours = module.state_dict()
    return max(float((ours[name] - value).abs().max()) for name, value in expected.items())


class Fails(L.Callback):
    """Rank 1 fails in its third batch."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 2:
            raise ValueError("the third batch of rank 1")


def main(case: str, folder: Path) -> None:
    use_host_runtime()
    if case == "train":
        train(folder)
    else:
        rank = int(os.environ.get("LOCAL_RANK", 0))
        failing = trainer(folder, callbacks=[Fails()])
        try:
            failing.fit(Module(), data(rank, 2))
        finally:
            strategy: Any = failing.strategy
            propagation = strategy.supervisor.propagation
            state = "not met" if propagation is None else propagation.attempt.state
            (folder / f"rank{rank}.txt").write_text(state)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
