"""One short training run of an MLP on two ranks, and how long a step took: the job of several topics."""

from __future__ import annotations

import gc
import itertools
import logging
import resource
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import lightning_lockstep
from tests.harness import on_device, run_ranks

#: A Trainer that only trains: nothing is logged, saved or shown.
BARE: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

_RANKS = 2

#: Layer widths of the models, by a name that says how many parameters they have.
WIDTHS = {
    "1 M": [512, 1024, 512],
    "10 M": [1024, 3072, 2048, 512],
    "100 M": [4096, 8192, 4096, 8192],
}


@dataclass(frozen=True)
class Job:
    """What to train, and with what: one thread a rank, batches of 32."""

    strategy: str
    model: str
    steps: int
    callbacks: tuple[str, ...] = ()
    """Callbacks of ours, by name, with their defaults."""
    items: bool = False
    """Whether the step returns ``num_items``."""


class Net(pl.LightningModule):
    """Linear layers with ReLU between them."""

    items = False  # whether the step returns the number of them

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for wide, next_wide in itertools.pairwise(widths):
            layers += [nn.Linear(wide, next_wide), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Any:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        return {"loss": loss, "num_items": len(inputs)} if self.items else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class AdamNet(Net):
    """With Adam, whose state is what ZeRO divides."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def t5() -> nn.Module:
    """A T5 of 9.4 M parameters."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=8000, decoder_start_token_id=0, **sizes))


class StepTimes(pl.Callback):
    """The time from the start of one batch to the start of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())

    def gaps(self, skip: int = 10) -> list[float]:
        """Seconds of each step but the first ones (buckets are rebuilt, memory is allocated)."""
        found = [after - before for before, after in itertools.pairwise(self.starts)]
        return found[min(skip, len(found) // 2) :]


def prepare() -> None:
    """Make this rank quiet, with one thread and a seed."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    gc.collect()


def peak() -> int:
    """Highest resident size of this process so far [bytes]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def batches(widths: list[int], steps: int, size: int = 32) -> list[Any]:
    """As many batches as steps, all views of a few: neither loading nor memory enters the measurement."""
    data = [(torch.randn(size, widths[0]), torch.randn(size, widths[-1])) for _ in range(8)]
    return [data[step % len(data)] for step in range(steps)]


class _Samples(torch.utils.data.Dataset[Any]):
    """Samples whose batches are ready, so that a plain loader takes no time."""

    def __init__(self, data: list[Any], size: int) -> None:
        self.data, self.size = data, size

    def __len__(self) -> int:
        return len(self.data) * self.size

    def __getitems__(self, indices: list[int]) -> Any:
        return self.data[indices[0] // self.size]


def _as_it_is(batch: Any) -> Any:
    return batch


def plain_loader(widths: list[int], batches_of_rank: int, size: int = 32) -> torch.utils.data.DataLoader[Any]:
    """A loader of samples for all ranks, of the kind that most programs have."""
    data = _Samples(batches(widths, _RANKS * batches_of_rank, size), size)
    return torch.utils.data.DataLoader(data, batch_size=size, collate_fn=_as_it_is)


def fit(job: Job) -> dict[str, float]:
    """Train on this rank; returns median and mean step time [s]."""
    prepare()
    widths, times = WIDTHS[job.model], StepTimes()
    ours = job.strategy == "lockstep_ddp"
    trainer = pl.Trainer(
        **on_device(_RANKS),
        strategy=lightning_lockstep.LockstepDDPStrategy(threads_per_rank=1) if ours else job.strategy,
        max_epochs=1,
        **BARE,
        callbacks=[*(getattr(lightning_lockstep, name)() for name in job.callbacks), times],
    )
    net = Net(widths)
    net.items = job.items
    trainer.fit(net, plain_loader(widths, job.steps))
    return {"median": statistics.median(times.gaps()), "mean": statistics.fmean(times.gaps())}


def in_ranks(job: Job, what: str) -> float:
    """Run the job on two fresh ranks without paying the import again; `median` or `mean` step of rank 0 [s]."""
    found = run_ranks(_RANKS, fit, job, backend=None, timeout=120, env={"OMP_NUM_THREADS": "1"})
    return float(found[0][what])
