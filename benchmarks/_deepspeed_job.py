"""What one rank does in the topic ``deepspeed``: the same steps by our strategy and by DeepSpeed's engine alone."""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import os
import resource
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist

from benchmarks._fit import BARE, Net, StepTimes

BATCH = 32


class AdamNet(Net):
    """With Adam, whose state is what ZeRO divides."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def config(stage: int) -> dict[str, Any]:
    """What both variants give to DeepSpeed; the bucket is small, since DeepSpeed allocates all of it."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 5_000_000,
            "allgather_bucket_size": 5_000_000,
        },
    }


def batches(widths: list[int], steps: int) -> list[Any]:
    data = [(torch.randn(BATCH, widths[0]), torch.randn(BATCH, widths[-1])) for _ in range(8)]
    return [data[step % len(data)] for step in range(steps)]


def watched(widths: list[int], stage: int, steps: int) -> dict[str, float]:
    """Fit with the strategy and an ``OverflowDetector`` that finds nothing."""
    from lightning_lockstep import OverflowDetector

    return ours(widths, stage, steps, OverflowDetector())


def ours(widths: list[int], stage: int, steps: int, *callbacks: pl.Callback) -> dict[str, float]:
    """Fit with the strategy; median step [s] and peak memory above the start [bytes]."""
    from lightning_lockstep import LockstepDeepSpeedStrategy

    _prepare()
    times = StepTimes()
    strategy = LockstepDeepSpeedStrategy(config=config(stage), threads_per_rank=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        **BARE,
        callbacks=[times, *callbacks],
    )
    before = psutil.Process().memory_info().rss
    loader = torch.utils.data.DataLoader(batches(widths, steps), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(AdamNet(widths), loader)
    return {"seconds": times.median(skip=5), "bytes": _peak() - before}


def bare(widths: list[int], stage: int, steps: int) -> dict[str, float]:
    """The same by ``deepspeed.initialize`` and a loop."""
    _prepare()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # to read it is to probe all operations
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    before = psutil.Process().memory_info().rss
    data = batches(widths, steps)
    net = AdamNet(widths)
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0),
        config=config(stage),
        model=net,
        model_parameters=list(net.parameters()),
        optimizer=net.configure_optimizers(),
        dist_init_required=False,
    )
    net.forward = lambda inputs: net.layers(inputs)  # type: ignore[method-assign]
    starts = []
    for inputs, targets in data:
        starts.append(time.perf_counter())
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    gaps = [after - begun for begun, after in itertools.pairwise(starts)]
    dist.destroy_process_group()
    return {"seconds": statistics.median(gaps[5:]), "bytes": _peak() - before}


def _prepare() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    gc.collect()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
