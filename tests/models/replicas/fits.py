"""Small fits on the ranks of a process group: in step, or going wrong on one of them; run in a rank."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_lockstep import (
    LockstepDDPStrategy,
    LockstepFSDPStrategy,
    ReplicaCheck,
    ReplicaMismatchError,
)
from lightning_lockstep.distributed import current_communicator
from tests.harness import QUIET, logged, on_device

EVERY_3 = {"audit_every_n_steps": 3}


@dataclass(kw_only=True)
class Case:
    """One fit: what is built, and what goes wrong on which rank."""

    steps: int = 12
    every: int = 5
    seed: int = 0
    optimizer: str = "AdamW"
    traits: tuple[str, ...] = ()  # of the module, see `Net`
    loader: str = "indexed"
    samples: int = 600
    batch: int = 4
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the callback
    hsdp: bool = False  # two copies of the model, each divided between two ranks
    # What goes wrong, see `Fault`; on which rank, after which batch, in which tensor.
    fault: str = ""
    rank: int = 1
    step: int = 3
    target: int = 0


class Net(LightningModule):
    """A few layers, with what a case asks for."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        traits = case.traits
        self.first = nn.Linear(8, 16)
        self.normal: nn.Module = nn.Identity()
        if "batchnorm" in traits:
            self.normal = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5 if "dropout" in traits else 0.0)
        self.middle = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.last = nn.Linear(16, 1)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        if "frozen" in traits:
            self.first.requires_grad_(False)
        if "other" in traits:
            self.other = nn.Linear(16, 1)
        self.automatic_optimization = not {"two optimizers", "loss.backward", "autograd.grad"} & set(traits)

    def features(self, x: Tensor) -> Tensor:
        x = self.drop(self.normal(self.first(x)))
        if "checkpointing" in self.case.traits:
            return checkpoint(self.middle, x, use_reentrant=False)
        return self.middle(x)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        if "statistics" in self.case.traits:
            self.average.lerp_(features.detach().mean(0), 0.1)
        self.batches += 1
        return self.last(features) * self.scale.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        if "two optimizers" in self.case.traits:
            self.two_steps(x)
            return None
        loss = (self(x) - x.sum(1, keepdim=True)).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if "loss.backward" in self.case.traits:
            loss.backward()
        else:
            wanted = [p for p in self.parameters() if p.requires_grad]
            for p, gradient in zip(wanted, torch.autograd.grad(loss, wanted), strict=True):
                p.grad = gradient
        optimizer.step()
        return None

    def two_steps(self, x: Tensor) -> None:
        """As a GAN does: one optimizer for the layers before, one for those after, each with its own loss."""
        before, after = self.optimizers()  # type: ignore[misc]
        for optimizer, sign in ((after, 1.0), (before, -0.1)):
            self.toggle_optimizer(optimizer)
            loss = sign * (self(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        make: Any = getattr(torch.optim, self.case.optimizer)
        options = {"momentum": 0.9} if self.case.optimizer == "SGD" else {}
        if "two optimizers" in self.case.traits:
            after = [*self.last.parameters()]
            before = [p for p in self.parameters() if all(p is not q for q in after)]
            return [make(before, lr=0.01, **options), make(after, lr=0.02, **options)], []
        optimizer = make([p for p in self.parameters() if p.requires_grad], lr=0.01, **options)
        if "schedule" in self.case.traits:
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
        return optimizer

    def optimizer_step(self, epoch: Any, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        case = self.case
        skips = case.fault == "skipped step" and case.rank == current_communicator().rank
        if skips and self.trainer.global_step == case.step:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples without an index."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.data


class Fault(Callback):
    """Does to one rank what a case says."""

    def __init__(self, case: Case) -> None:
        self.case, self.done = case, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.done += 1
        if self.done == self.case.step and current_communicator().rank == self.case.rank:
            self.do(trainer, pl_module)

    @torch.no_grad()
    def do(self, trainer: Any, module: Any) -> None:
        case = self.case
        optimizer = trainer.optimizers[0]
        if case.fault == "bit":
            parameters = held(module.parameters())
            flip(parameters[case.target])
        elif case.fault == "bit of state":
            states = held(v for p in module.parameters() for k, v in sorted(optimizer.state[p].items()) if k != "step")
            flip(states[case.target])
        elif case.fault == "rate":
            optimizer.param_groups[0]["lr"] *= 2
        elif case.fault == "buffer":
            flip(module.scale)
        elif case.fault == "layer":
            held(module.parameters())[case.target].mul_(1.5)


class Hooked(Callback):
    """Lets a module do something else on each of the chosen ranks."""

    def __init__(self, hook: Any, *ranks: int) -> None:
        self.hook, self.ranks = hook, ranks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if current_communicator().rank in self.ranks:
            pl_module.middle[0].register_forward_hook(self.hook)


def of_rank(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + current_communicator().rank


def held(tensors: Iterable[Any]) -> list[Tensor]:
    """Return what this rank holds of tensors, without those of which it has nothing."""
    own = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    return [one for one in own if one.numel()]


def flip(tensor: Tensor) -> None:
    """Change one bit of a value that is not zero: one of the mantissa that training does not round away."""
    values = tensor.view(-1)
    values.view(torch.int32)[values.nonzero().view(-1)[0]] ^= 1 << 10


@torch.no_grad()
def off_by_a_bit(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Change one bit of the greatest value, as a multiplier of a device that fails."""
    values = output.data.view(-1)
    values.view(torch.int32)[values.argmax()] ^= 1 << 12


def loader_of(case: Case) -> DataLoader[Any]:
    data = torch.randn(case.samples, 8, generator=torch.Generator().manual_seed(case.seed))
    communicator = current_communicator()
    if case.loader.startswith("constant"):
        data = torch.ones(case.samples, 8)
    if case.loader in ("constant stream", "whole stream"):
        return DataLoader(Stream(data), batch_size=case.batch)
    if case.loader == "stream":
        rank, world_size = communicator.rank, communicator.world_size
        return DataLoader(Stream(data[rank::world_size]), batch_size=case.batch)
    if case.loader == "uneven":
        data = data[communicator.rank :: communicator.world_size][: 40 + 8 * communicator.rank]
    dataset: Dataset[Any] = TensorDataset(data)
    return DataLoader(dataset, batch_size=case.batch, shuffle=case.loader == "shuffled")


def fit(case: Case, **more: Any) -> dict[str, Any]:
    """Fit on the ranks of this process group; returns the error that was raised, and what was logged."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(case.seed)
    module, check = more.pop("make", Net)(case), ReplicaCheck(every_n_steps=case.every, **case.options)
    if case.fault == "device" and current_communicator().rank == case.rank:
        module.middle[0].register_forward_hook(off_by_a_bit)
    callbacks: list[Any] = [Fault(case), *more.pop("callbacks", []), check]
    if "EMA" in case.traits:
        callbacks.insert(0, EMAWeightAveraging(decay=0.9))
    if "SWA" in case.traits:
        callbacks.insert(0, StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1))
    if "unfreezes" in case.traits:
        module.first.requires_grad_(False)
    strategy = more.pop("plain_strategy", None)
    if case.hsdp:
        mesh = {"shard": 2, "replicate": 2}
        strategy = strategy or LockstepFSDPStrategy(threads_per_rank=1, shard="Linear", mesh=mesh)
    strategy = strategy or LockstepDDPStrategy(threads_per_rank=1, **case.strategy)
    with (
        tempfile.TemporaryDirectory() as folder,
        logged("lightning_lockstep.callbacks.replica_check") as lines,
    ):
        trainer = Trainer(
            **on_device(more.pop("devices", current_communicator().world_size)),
            strategy=strategy,
            max_steps=case.steps,
            **QUIET,
            default_root_dir=folder,
            callbacks=callbacks,
            **{**case.trainer, **more},
        )
        error = None
        try:
            trainer.fit(module, loader_of(case))
            if "resume" in case.traits:
                path = current_communicator().broadcast(f"{folder}/saved.ckpt")
                trainer.save_checkpoint(path)
                trainer.fit_loop.epoch_loop.max_steps *= 2
                trainer.fit(module, loader_of(case), ckpt_path=path, weights_only=False)
            current_communicator().barrier()
        except ReplicaMismatchError as raised:
            error = str(raised)
    return {"error": error, "lines": lines, "steps": trainer.global_step}
