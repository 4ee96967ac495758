"""LockstepFSDPStrategy over a fully_shard loop, and DDP beside them, 2 ranks, CPU: step time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeAlias

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks._fit import BARE, peak, prepare
from benchmarks.engine import Comparison, Report, Samples, Table
from benchmarks.turns import Turns, in_turn
from lightning_lockstep import LockstepDDPStrategy, LockstepFSDPStrategy
from tests.harness import run_ranks

MIB = 2**20
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

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

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


def batches(steps: int) -> list[Tensor]:
    data = [torch.randint(0, VOCABULARY, (BATCH, CONTEXT)) for _ in range(8)]
    return [data[step % len(data)] for step in range(steps)]


def fit(make: Callable[..., Any], size: Size, steps: int, at_step: AtStep) -> None:
    """Fit with a strategy."""

    class Starts(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            at_step()

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=make(threads_per_rank=1),
        max_epochs=1,
        use_distributed_sampler=False,
        **BARE,
        callbacks=[Starts()],
    )
    loader = torch.utils.data.DataLoader(batches(steps), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Transformer(*size), loader)


def bare(size: Size, steps: int, at_step: AtStep) -> None:
    """The same by ``fully_shard`` and a loop."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    data = batches(steps)
    net = Transformer(*size)
    for tensor in (*net.parameters(), *net.buffers()):
        dist.broadcast(tensor.detach(), 0)
    for part in (*net.layers, net):
        fully_shard(part)
    optimizer = net.configure_optimizers()
    for batch in data:
        at_step()
        loss = nn.functional.cross_entropy(net(batch).flatten(0, 1), batch.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


PEER, OURS, DDP = "fully_shard", "lockstep_fsdp", "lockstep_ddp"
VARIANTS: dict[str, Callable[[Size, int, AtStep], None]] = {
    PEER: bare,
    OURS: lambda *run: fit(LockstepFSDPStrategy, *run),
    DDP: lambda *run: fit(LockstepDDPStrategy, *run),
}


def train_in_turn(turns: Turns) -> None:
    """Train the small model on one rank."""
    prepare()
    VARIANTS[turns.name](SMALL, turns.total, turns.step)


def step_time(processes: int, turns: int) -> Comparison:
    samples: Samples = {name: [] for name in VARIANTS}
    for number in range(processes):
        print(f"step: processes {number + 1}/{processes}", flush=True)
        found = in_turn(train_in_turn, list(VARIANTS), ranks=2, steps=4, turns=turns)
        for name, seconds in found.items():
            samples[name] += seconds
    title = f"step, {parameters(SMALL) / 1e6:.1f} M parameters, {BATCH} x {CONTEXT} bytes per rank, 1 thread"
    return Comparison(title, samples, peer=PEER, at_most={OURS: 1.03})


def parameters(size: Size) -> int:
    return sum(parameter.numel() for parameter in Transformer(*size).parameters())


def memory_of_rank(name: str, steps: int) -> int:
    """Train the large model on one rank; its highest memory above that before [bytes]."""
    prepare()
    VARIANTS[name](FIRST, 2, lambda: None)
    before = psutil.Process().memory_info().rss
    VARIANTS[name](LARGE, steps, lambda: None)
    return peak() - before


def memory(rounds: int) -> Table:
    def highest(name: str) -> int:
        env = {"OMP_NUM_THREADS": "1"}
        return max(run_ranks(2, memory_of_rank, name, 8, backend=None, timeout=240, env=env))

    found = {name: statistics.median(highest(name) for _ in range(rounds)) for name in VARIANTS}
    rows = [[name, f"{value / MIB:.0f}", f"{value / found[PEER]:.3f}"] for name, value in found.items()]
    print(f"memory: {rows}", flush=True)
    title = f"peak memory of a rank above its start, {parameters(LARGE) / 1e6:.1f} M parameters float32, AdamW"
    return Table(f"{title}; goal of {OURS}: 1.02", ["", "MiB", f"over {PEER}"], rows)


def run(quick: bool) -> Report:
    """Step time of all variants in turn, and memory."""
    steps = step_time(1, 2) if quick else step_time(4, 24)
    tables: list[Comparison | Table] = [steps, memory(1 if quick else 3)]
    notes = [
        "All variants are alive at once, each on two ranks, and make 4 steps in turn; a sample is a turn, and there"
        " are 24 of them in each of 4 sets of processes. They have the same model, data and optimizer, and those that"
        " divide it the same units: a layer each.",
        "Memory is the highest resident size of the process less that before the model is made, after a run of a small"
        " model: so it has the whole model that every rank makes at first, activations and batches, and not what"
        " a process loads once.",
    ]
    return Report("LockstepFSDPStrategy over a fully_shard loop, 2 ranks, gloo", tables, notes)
