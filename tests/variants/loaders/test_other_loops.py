"""SWA, the Tuner's search for a rate and LightningCLI give on two ranks what they give on one."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepDDPStrategy
from tests.harness import QUIET, on_device, run_ranks

SAMPLES, GLOBAL_BATCH = 101, 16


def ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


class Net(LightningModule):
    """Its batch norm sees what each rank has, and does not change the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 1, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64)
        nn.init.constant_(self.layer.weight, 0.1)
        self.norm.requires_grad_(False)
        self.lr, self.batch_size = 0.05, GLOBAL_BATCH // ranks()
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, numbers = batch
        if not self.trainer.strategy.is_padding_batch():  # type: ignore[attr-defined]
            self.seen += [(self.trainer.current_epoch, int(number)) for number in numbers]
        self.norm(inputs)
        return (self.layer(inputs).squeeze(1) - numbers % 5).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)

    def weights(self) -> list[float]:
        return [*self.layer.weight.flatten().tolist(), *self.layer.bias.tolist()]


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(GLOBAL_BATCH // ranks())


def loader(size: int) -> DataLoader[Any]:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(inputs, torch.arange(SAMPLES)), size, shuffle=True)


def trainer(**options: Any) -> Trainer:
    seed_everything(3, verbose=False)
    given: dict[str, Any] = {**QUIET, **on_device(ranks()), "max_epochs": 3, **options}
    return Trainer(**given, strategy=LockstepDDPStrategy())


def other_loops() -> dict[str, Any]:
    """What each gives, the same on any number of ranks; ``seen`` is what this rank has seen."""
    found: dict[str, Any] = {}
    one = trainer(callbacks=[StochasticWeightAveraging(0.02, 1)])
    net = Net()
    one.fit(net)
    found["SWA"] = net.weights()
    found["SWA, batches of the pass for batch norm, steps"] = [
        float(net.norm.num_batches_tracked),
        one.global_step,
    ]  # type: ignore[arg-type]
    found["SWA, seen"] = net.seen
    net = Net()
    one = trainer()
    finder = Tuner(one).lr_find(net, num_training=20, early_stop_threshold=None)
    found["rates"] = None if finder is None else finder.results["lr"]
    net.seen.clear()
    net.lr = 0.05
    one.fit(net)
    found["fit after lr_find"] = net.weights()
    found["fit after lr_find, seen"] = net.seen
    options = {**QUIET, **on_device(ranks()), "max_epochs": 3, "strategy": "lockstep_ddp"}
    cli = LightningCLI(
        Net,
        Data,
        seed_everything_default=3,
        save_config_callback=None,
        trainer_defaults=options,
        args=["fit"],
    )
    found["LightningCLI"] = cli.model.weights()
    found["LightningCLI, seen"] = cli.model.seen
    return found


def test_other_loops_do_on_two_ranks_what_they_do_on_one() -> None:
    (alone,) = run_ranks(1, other_loops, backend=None, timeout=200)
    both = run_ranks(2, other_loops, backend=None, timeout=200)
    for of_rank in both:
        for name, value in alone.items():
            if not name.endswith("seen"):
                torch.testing.assert_close(
                    of_rank[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
                )
    for name in alone:
        if name.endswith("seen"):
            seen = Counter(sample for of_rank in both for sample in of_rank[name])
            assert seen == Counter(alone[name]) and set(seen.values()) == {1}, name
