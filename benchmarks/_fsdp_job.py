"""What one rank does in the topic ``fsdp``: the same steps by each way of dividing a model, and by DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks._deepspeed_job import _peak, _prepare, config
from benchmarks._fit import BARE
from benchmarks.turns import Turns
from lightning_lockstep import LockstepDDPStrategy, LockstepDeepSpeedStrategy, LockstepFSDPStrategy

BATCH, CONTEXT, VOCABULARY = 4, 32, 256
Size: TypeAlias = "tuple[int, int]"  # width, layers
SMALL, LARGE = (328, 8), (1024, 8)  # 10.6 M and 101 M parameters: in the latter what libraries take is little
#: Of a run before the one whose memory is measured: what a process loads and starts once comes with it.
FIRST = (128, 2)
AtStep: TypeAlias = Callable[[], None]


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


def fit(make: Callable[[], Any], size: Size, steps: int, at_step: AtStep, net: Any = Transformer) -> None:
    """Fit with a strategy."""

    class Starts(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            at_step()

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=make(),
        max_epochs=1,
        use_distributed_sampler=False,
        **BARE,
        callbacks=[Starts()],
    )
    trainer.fit(net(*size), torch.utils.data.DataLoader(batches(steps), batch_size=None))  # type: ignore[arg-type]


def ours(*run: Any) -> None:
    fit(lambda: LockstepFSDPStrategy(threads_per_rank=1), *run)


def ddp(*run: Any) -> None:
    fit(lambda: LockstepDDPStrategy(threads_per_rank=1), *run)


def zero_3(*run: Any) -> None:
    given = {**config(3), "train_micro_batch_size_per_gpu": BATCH}
    fit(lambda: LockstepDeepSpeedStrategy(config=given, threads_per_rank=1), *run)


def lightning(*run: Any) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    fit(lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), *run, net=Divided)


def bare(size: Size, steps: int, at_step: AtStep) -> None:
    """The same by ``fully_shard`` and a loop."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    data = batches(steps)
    net = Transformer(*size)
    for tensor in (*net.parameters(), *net.buffers()):
        dist.broadcast(tensor.detach(), 0)
    divide(net)
    optimizer = net.configure_optimizers()
    for batch in data:
        at_step()
        loss = nn.functional.cross_entropy(net(batch).flatten(0, 1), batch.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


PEER, OURS = "fully_shard", "lockstep_fsdp"
VARIANTS: dict[str, Callable[[Size, int, AtStep], None]] = {
    PEER: bare,
    OURS: ours,
    "ModelParallelStrategy": lightning,
    "lockstep_deepspeed, stage 3": zero_3,
    "lockstep_ddp": ddp,
}


def train_in_turn(turns: Turns) -> None:
    """Train the small model on one rank."""
    _prepare()
    VARIANTS[turns.name](SMALL, turns.total, turns.step)


def peak(name: str, steps: int) -> int:
    """Train the large model on one rank; its highest memory above that before [bytes]."""
    _prepare()
    VARIANTS[name](FIRST, 2, lambda: None)
    before = psutil.Process().memory_info().rss
    VARIANTS[name](LARGE, steps, lambda: None)
    highest: int = _peak()
    return highest - before
