"""A user's script with a strategy of its own: no DDP, a tiny all-reduce, and the life cycle by composition.

python own_strategy.py CASE ..., where CASE is fit, truncate, join, error, raise
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep.errors import LockstepError
from lightning_lockstep.launchers import detect_environment
from lightning_lockstep.strategies import LifecycleSettings, RankLifecycle


class AveragingStrategy(ParallelStrategy):
    """Averages gradients after each backward, parameter by parameter."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cluster_environment=detect_environment())
        self.lifecycle = RankLifecycle(self, LifecycleSettings(**options))
        self.num_nodes = 1

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank]  # type: ignore[index]

    def _configure_launcher(self) -> None:
        self._launcher = self.lifecycle.launcher()

    def set_world_ranks(self) -> None:
        self.lifecycle.set_world_ranks()

    def setup_environment(self) -> None:
        super().setup_environment()
        self.lifecycle.connect()

    def process_dataloader(self, dataloader: object) -> object:
        return self.lifecycle.process_dataloader(dataloader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.lifecycle.contributing():
            return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        for parameter in self.model.parameters():  # type: ignore[union-attr]
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size  # type: ignore[misc]

    def model_to_device(self) -> None:
        self.model.to(self.root_device)  # type: ignore[union-attr]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.lifecycle.failed and dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def teardown(self) -> None:
        self.lifecycle.teardown()
        super().teardown()


class Net(L.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.case, self.batches = case, 0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
        self.batches += 1
        if self.case == "raise" and batch_idx == 2 and self.global_rank == 1:
            raise ValueError("boom in training_step")
        if self.case == "fit" and batch_idx == 1 and self.global_rank == 1:
            return None  # the others still get the reduction they wait for
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(case: str) -> None:
    L.seed_everything(1, verbose=False)
    policy = case if case in ("truncate", "join") else "error"
    strategy = AveragingStrategy(threads_per_rank=1, grace_period=8.0, uneven_inputs=policy)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    net = Net(case)
    has_less = case in ("error", "truncate", "join") and os.environ.get("LOCAL_RANK") == "1"
    rows = 32 if has_less else 48
    data = TensorDataset(torch.randn(rows, 8), torch.randint(0, 4, (rows,)))
    try:
        trainer.fit(net, DataLoader(data, batch_size=8))
    except LockstepError as error:
        sys.stdout.write(f"{case}: rank {trainer.global_rank} caught {type(error).__name__}: {error}\n")
        if case == "raise":
            raise
        return
    weight = net.layer.weight.detach().double().sum().item()
    sys.stdout.write(
        f"{case}: rank {trainer.global_rank} of {trainer.world_size} threads {torch.get_num_threads()}"
        f" steps {trainer.global_step} batches {net.batches} weight {weight:.9f}\n"
    )


if __name__ == "__main__":
    for each in sys.argv[1:]:
        run(each)
