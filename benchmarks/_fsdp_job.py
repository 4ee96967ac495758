"""What one rank does in the topic ``fsdp``: the same steps by each way of dividing a model, and by DDP."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks._deepspeed_job import _peak, _prepare, config
from benchmarks._fit import BARE, StepTimes
from lightning_lockstep import LockstepDDPStrategy, LockstepDeepSpeedStrategy, LockstepFSDPStrategy

BATCH, CONTEXT, VOCABULARY = 4, 32, 256
#: Width, layers and steps of a run before the one that is measured: what a process loads and starts once comes with it.
FIRST = (128, 2, 2)


class Layer(nn.TransformerEncoderLayer):
    """A layer that is one unit."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


class Transformer(pl.LightningModule):
    """Reads bytes; with width 328 and 8 layers it has 10.5 M parameters."""

    divides = False  # whether configure_model does

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def configure_model(self) -> None:
        if self.divides and not any(
            isinstance(p, torch.distributed.tensor.DTensor) for p in self.parameters()
        ):
            divide(self, self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Divided(Transformer):
    """As Lightning's ModelParallelStrategy asks for it."""

    divides = True


def divide(net: Transformer, mesh: Any = None) -> None:
    for part in (*net.layers, net):
        fully_shard(part, **({} if mesh is None else {"mesh": mesh}))


def batches(steps: int) -> list[Tensor]:
    data = [torch.randint(0, VOCABULARY, (BATCH, CONTEXT)) for _ in range(8)]
    return [data[step % len(data)] for step in range(steps)]


def fitted(
    make: Callable[[], Any], width: int, layers: int, steps: int, net: type[Transformer] = Transformer
) -> dict[str, float]:
    """Fit with a strategy; median step [s] and peak memory above the start [bytes]."""
    _prepare()
    for size in (FIRST, (width, layers, steps)):
        times = StepTimes()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=make(),
            max_epochs=1,
            use_distributed_sampler=False,
            **BARE,
            callbacks=[times],
        )
        before = psutil.Process().memory_info().rss
        data = torch.utils.data.DataLoader(batches(size[2]), batch_size=None)  # type: ignore[arg-type]
        trainer.fit(net(*size[:2]), data)
    return {"seconds": times.median(skip=5), "bytes": _peak() - before}


def ours(*size: int) -> dict[str, float]:
    return fitted(lambda: LockstepFSDPStrategy(threads_per_rank=1), *size)


def ddp(*size: int) -> dict[str, float]:
    return fitted(lambda: LockstepDDPStrategy(threads_per_rank=1), *size)


def zero_3(*size: int) -> dict[str, float]:
    given = {**config(3), "train_micro_batch_size_per_gpu": BATCH}
    return fitted(lambda: LockstepDeepSpeedStrategy(config=given, threads_per_rank=1), *size)


def lightning(*size: int) -> dict[str, float]:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return fitted(lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), *size, Divided)


def bare(width: int, layers: int, steps: int) -> dict[str, float]:
    """The same by ``fully_shard`` and a loop."""
    _prepare()
    dist.init_process_group("gloo")
    for size in (FIRST, (width, layers, steps)):
        before = psutil.Process().memory_info().rss
        starts = looped(*size)
    gaps = [after - begun for begun, after in itertools.pairwise(starts)]
    dist.destroy_process_group()
    return {"seconds": statistics.median(gaps[5:]), "bytes": _peak() - before}


def looped(width: int, layers: int, steps: int) -> list[float]:
    """When each step began [s]."""
    data = batches(steps)
    net = Transformer(width, layers)
    for tensor in (*net.parameters(), *net.buffers()):
        dist.broadcast(tensor.detach(), 0)
    divide(net)
    optimizer = net.configure_optimizers()
    starts = []
    for batch in data:
        starts.append(time.perf_counter())
        loss = nn.functional.cross_entropy(net(batch).flatten(0, 1), batch.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return starts
