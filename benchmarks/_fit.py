"""One short training run of an MLP on two ranks, and how long a step took: the job of several topics.

As a script it starts its ranks as a user's script does; from ``run_ranks`` each rank calls :func:`fit`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.helpers.device import on_device

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
    "tiny": [16, 16, 16],
    "1 M": [512, 1024, 512],
    "10 M": [1024, 3072, 2048, 512],
}


@dataclass(frozen=True)
class Job:
    """What to train, and with what."""

    strategy: str
    model: str
    steps: int
    batch: int = 32
    threads: int | None = None
    """The same number of CPU threads for every strategy; None: each strategy's own default."""
    callbacks: tuple[str, ...] = ()
    """Callbacks of ours, by name, with their defaults."""
    counts_items: bool = False
    """Whether ``training_step`` returns ``num_items``."""


class Net(pl.LightningModule):
    """Linear layers with ReLU between them."""

    def __init__(self, widths: list[int], *, counts_items: bool = False) -> None:
        super().__init__()
        self.counts_items = counts_items
        layers: list[nn.Module] = []
        for wide, next_wide in itertools.pairwise(widths):
            layers += [nn.Linear(wide, next_wide), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Any:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        return {"loss": loss, "num_items": len(targets)} if self.counts_items else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepTimes(pl.Callback):
    """The time from the start of one batch to the start of the next."""

    def __init__(self, at_start: Callable[[], None] | None = None) -> None:
        self._at_start = at_start
        self.starts: list[float] = []
        self.processor: list[float] = []
        self.threads = 0

    def on_train_batch_start(self, *_: Any) -> None:
        if self._at_start is not None:
            self._at_start()
        self.starts.append(time.perf_counter())
        self.processor.append(time.process_time())
        self.threads = torch.get_num_threads()

    def median(self, skip: int = 10) -> float:
        """Median seconds a step, without the first ones (buckets are rebuilt, memory is allocated)."""
        gaps = [after - before for before, after in itertools.pairwise(self.starts)]
        return statistics.median(gaps[min(skip, len(gaps) // 2) :])

    def mean(self, skip: int = 10) -> float:
        """Mean seconds a step, without the first ones."""
        gaps = [after - before for before, after in itertools.pairwise(self.starts)]
        return statistics.fmean(gaps[min(skip, len(gaps) // 2) :])

    def mean_processor(self, skip: int = 10) -> float:
        """Mean seconds of processor time a step, of all threads, without the first ones."""
        skip = min(skip, len(self.processor) // 2)
        return (self.processor[-1] - self.processor[skip]) / (len(self.processor) - 1 - skip)


def make_callbacks(job: Job) -> list[Any]:
    """Our callbacks of the job."""
    if not job.callbacks:
        return []
    import lightning_lockstep

    return [getattr(lightning_lockstep, name)() for name in job.callbacks]


def make_strategy(job: Job) -> Any:
    """Lightning's strategy by name, ours as an object where it needs an option."""
    if job.threads is not None and job.strategy == "lockstep_ddp":
        from lightning_lockstep import LockstepDDPStrategy

        return LockstepDDPStrategy(threads_per_rank=job.threads)
    import lightning_lockstep  # noqa: F401 - registers the name

    return job.strategy


def fit(job: Job, at_start: Callable[[], None] | None = None) -> dict[str, float]:
    """Train on this rank; returns median and mean step time [s] and the number of threads it ran with.

    Args:
        job: What to train.
        at_start: Called at the start of each step.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    pl.seed_everything(1, verbose=False)
    widths = WIDTHS[job.model]
    # As many batches as steps, all views of a few: neither loading nor memory enters the measurement.
    data = [(torch.randn(job.batch, widths[0]), torch.randn(job.batch, widths[-1])) for _ in range(8)]
    batches = [data[step % len(data)] for step in range(_RANKS * job.steps)]
    times = StepTimes(at_start)
    trainer = pl.Trainer(
        **on_device(_RANKS),
        strategy=make_strategy(job),
        max_epochs=1,
        **BARE,
        callbacks=[*make_callbacks(job), times],
    )
    net = Net(widths, counts_items=job.counts_items)
    trainer.fit(net, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {
        "seconds": times.median(),
        "mean": times.mean(),
        "processor": times.mean_processor(),
        "threads": float(times.threads),
    }


def main() -> None:
    """Run one job as a script; rank 0 writes the result to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", help="the Job as JSON")
    parser.add_argument("result", type=Path)
    given = parser.parse_args()
    result = fit(Job(**json.loads(given.job)))
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    if rank_zero_only.rank == 0:
        given.result.write_text(json.dumps(result))


def arguments(job: Job, result: Path) -> list[str]:
    """The command line after the interpreter that runs a job as a script."""
    return [str(Path(__file__).resolve()), json.dumps(asdict(job)), str(result)]


if __name__ == "__main__":
    main()
