"""What random numbers by sample and batch norm of the global batch cost: a sample, a dropout, a step."""

from __future__ import annotations

import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._fit import BARE
from benchmarks.engine import Comparison, Report, Samples, interleave
from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.steps.sample_numbers import BatchPlace, SampleNumbers
from tests.harness import chosen_device, on_device, run_ranks, wait_for_device

OFF, ON = "of_rank", "by sample"
SAMPLES, STEPS = 20_000, 60


class Squares(TensorDataset):
    """As cheap as a data set can be."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def linear() -> nn.Module:
    """1 M parameters, nothing random."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def dropout() -> nn.Module:
    """The same with dropout behind each layer."""
    layers = [[layer, nn.Dropout(0.1)] if isinstance(layer, nn.ReLU) else [layer] for layer in linear()]  # type: ignore[union-attr]
    return nn.Sequential(*(layer for some in layers for layer in some))


def convolutions(stride: int = 2) -> nn.Module:
    """Three convolutions, with a batch norm behind each; with a stride of 2 they are small."""
    layers: list[nn.Module] = []
    for inner, outer in (3, 16), (16, 32), (32, 32):
        layers += [nn.Conv2d(inner, outer, 3, stride, 1), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def large_convolutions() -> nn.Module:
    """The same at the full size of the images."""
    return convolutions(1)


class StepAlone(Callback):
    """The time of each step without that of loading its batch, which has a table of its own."""

    def __init__(self) -> None:
        self.took: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        wait_for_device()
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        wait_for_device()
        self.took.append(time.perf_counter() - self._began)


class Task(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(build: Callable[[], nn.Module], size: int, steps: int, options: dict[str, Any]) -> list[float]:
    """Train on this rank; the time of each step [s]."""
    torch.manual_seed(1)
    times = StepAlone()
    trainer = Trainer(
        **on_device(int(os.environ["WORLD_SIZE"])),
        strategy=LockstepDDPStrategy(threads_per_rank=1, **options),
        max_epochs=1,
        callbacks=[times],
        **BARE,
    )
    count = size * trainer.world_size * steps
    data = TensorDataset(torch.randn(1, 3, 16, 16).expand(count, -1, -1, -1), torch.zeros(count).long())
    trainer.fit(Task(build()), DataLoader(data, size))
    return times.took[10:]


def in_turn(build: Callable[[], nn.Module], size: int, steps: int, rounds: int, on: dict[str, Any]) -> Samples:
    """Both ways in turn, in one group of ranks; the median step of each fit [s]."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    ways = {OFF: {}, ON: on}
    variants = {
        name: lambda given=given: statistics.median(fit(build, size, steps, given)) for name, given in ways.items()
    }
    return interleave(variants, rounds=rounds, warmup=1)  # type: ignore[arg-type]


def loading(rounds: int) -> Samples:
    """Seconds that a sample takes to be loaded, in one process."""
    from lightning_lockstep.loaders.global_order import PlacedBatch, seeded_by_sample

    data = Squares(torch.zeros(SAMPLES, 1))
    batches = [range(first, first + 32) for first in range(0, SAMPLES, 32)]
    places = [
        PlacedBatch(batch, BatchPlace(0, number, 32 * number, 1, len(batch))) for number, batch in enumerate(batches)
    ]
    loaders = {
        OFF: DataLoader(data, batch_sampler=batches),  # type: ignore[arg-type]
        ON: seeded_by_sample(DataLoader(data, batch_sampler=places), 1),  # type: ignore[arg-type]
    }

    def measure(loader: DataLoader[Any]) -> float:
        began = time.perf_counter()
        for _ in loader:
            pass
        return (time.perf_counter() - began) / SAMPLES

    return interleave(
        {name: lambda loader=loader: measure(loader) for name, loader in loaders.items()},  # type: ignore[misc]
        rounds=rounds,
        warmup=1,
    )


def dropouts(shape: tuple[int, ...], rounds: int) -> Samples:
    """Seconds of F.dropout and of that by sample, one thread."""
    x = torch.randn(shape, device=chosen_device())
    mode, place = SampleNumbers(1), BatchPlace(0, 0, 0, 1, shape[0])

    def measure(of_sample: bool) -> float:
        began = time.perf_counter()
        if of_sample:
            with mode.step(place, 0, device=x.device):
                for _ in range(20):
                    F.dropout(x, 0.1)
        else:
            for _ in range(20):
                F.dropout(x, 0.1)
        wait_for_device()
        return (time.perf_counter() - began) / 20

    return interleave({OFF: lambda: measure(False), ON: lambda: measure(True)}, rounds=rounds, warmup=2)


def run(quick: bool) -> Report:
    rounds, steps = (3, 30) if quick else (11, STEPS)
    of_sample, of_batch = {"random_numbers": "of_sample"}, {"batch_norm": "of_batch"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tables = [
        Comparison(
            "a sample loaded, batch 32, in process",
            loading(rounds),
            peer=OFF,
            unit="us",
            scale=1e6,
            at_most={ON: 8},
            by="difference",
        )
    ]
    for shape in (32, 1024), (32, 128, 256):
        title = f"a dropout of {' x '.join(map(str, shape))}, 1 thread"
        tables.append(Comparison(title, dropouts(shape, 3 * rounds), peer=OFF, at_most={ON: 1.0}))
    torch.set_num_threads(threads)
    for title, build, options, goal in (
        ("a step without any draw, 1 M parameters", linear, of_sample, 1.02),
        ("a step with dropout, 1 M parameters", dropout, of_sample, 1.02),
        ("a step of three small convolutions with batch norm", convolutions, of_batch, 1.25),
        ("a step of three large convolutions with batch norm", large_convolutions, of_batch, 1.25),
    ):
        for ranks in (1, 2):
            print(f"{title}, {ranks}", flush=True)
            samples = run_ranks(ranks, in_turn, build, 64, steps, rounds, options, backend=None, timeout=600)[0]
            shown = f"{title}, {ranks} rank{'s' * (ranks > 1)}, batch 64 per rank"
            tables.append(Comparison(shown, samples, peer=OFF, at_most={ON: goal}))
    notes = [
        "Both ways take turns in one group of ranks, one thread a rank; a sample is the median step of a fit,"
        " without the time in which its batch is loaded.",
        "With two ranks on two cores a small collective over gloo takes 0.3 to 4 ms here, and three norms have six.",
    ]
    return Report("What numbers by sample and batch norm of the batch cost", tables, notes)
