"""Gradients of two real ranks, whatever the parameters are, and if a rank has no loss: as one process gets them.

Starting ranks is what costs, so one pair of ranks runs all the fits.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_lockstep import CollectiveMismatchError, LockstepDDPStrategy
from lightning_lockstep._lightning import LightningModule, Trainer, seed_everything
from tests.harness import run_ranks
from tests.ranks.strategies.test_fits import QUIET

SAMPLES, BATCH = 24, 8  # of all ranks together


class Net(LightningModule):
    """A sum of a layer and a sparse embedding, which get one gradient, and of parameters of many kinds."""

    # `left_out`: what rank 1 returns for some batches.
    def __init__(self, *, left_out: str = "", unused: bool = False, complex_too: bool = True) -> None:
        super().__init__()
        seed_everything(1, verbose=False)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.tokens, self.bag = nn.Embedding(12, 4, sparse=True), nn.EmbeddingBag(12, 4, sparse=True)
        self.transposed = nn.Parameter(torch.ones(3, 4).t())
        self.empty, self.scalar = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.tensor(1.0))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64 if complex_too else torch.float32))
        self.last = nn.Linear(4, 1)
        if unused:
            self.unused = nn.Parameter(torch.ones(2))
        self.left_out = left_out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        image, tokens, target = batch
        hidden = self.conv(image.contiguous(memory_format=torch.channels_last)).mean((2, 3)) + self.bag(tokens)
        hidden = hidden * self.scalar + self.transposed.sum(1) + self.empty.sum(0)
        hidden = (hidden * self.phase.abs() * self.wide).float()
        loss = (self.last(hidden + self.tokens(tokens[:, 0])) - target[:, None]).square().mean()
        if batch_idx in (1, 2) and self.global_rank == 1 and self.left_out:
            return None if self.left_out == "none" else loss * 0.0
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        dense = [p for name, p in self.named_parameters() if name not in ("tokens.weight", "bag.weight")]
        groups = [{"params": dense, "weight_decay": 0.1}, {"params": [self.tokens.weight, self.bag.weight]}]
        return torch.optim.SGD(groups, 0.02)

    def values(self) -> dict[str, list[float]]:
        return {
            name: (torch.view_as_real(p) if p.is_complex() else p).detach().flatten().tolist()
            for name, p in self.named_parameters()
        }


def data(world_size: int, rank: int) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(2)
    images, tokens = (
        torch.rand(SAMPLES, 3, 8, 8, generator=drawn),
        torch.randint(12, (SAMPLES, 3), generator=drawn),
    )
    whole = TensorDataset(images, tokens, torch.rand(SAMPLES, generator=drawn))
    return DataLoader(Subset(whole, range(rank, SAMPLES, world_size)), BATCH // world_size)


def fitted(net: Net, *, strategy: Any = None, **options: Any) -> Any:
    trainer = Trainer(
        **{**QUIET, "max_epochs": 2, **options},
        strategy=LockstepDDPStrategy(**{"stall_timeout": 20, **(strategy or {})}),
    )
    trainer.fit(net, data(2, int(os.environ["RANK"])))
    return net.values()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "copied": {"strategy": {"gradient_as_bucket_view": False}},
    "unused": {"strategy": {"find_unused_parameters": True}, "unused": True},
    "static": {"strategy": {"static_graph": True}},
    "accumulated": {"accumulate_grad_batches": 2},
    "half": {"precision": "16-mixed", "complex_too": False},
    "bfloat16": {"precision": "bf16-mixed"},
    "compressed": {"strategy": {"ddp_comm_hook": "bf16_compress"}, "complex_too": False},
}


def fits() -> dict[Any, Any]:
    found: dict[Any, Any] = {"together": fitted(Net()), "of one process": of_one_process()}
    for search in (None, "strong_wolfe"):
        found["curve", search] = learned(Curve(search))
        found["curve", search, "by hand"] = learned(Curve(search, by_hand=True))
        found["curve", search, "alone"] = learned_alone(Curve(search))
    for name, given in OPTIONS.items():
        for left_out in ("none", "times 0"):
            options = dict(given)
            of_net = {key: options.pop(key) for key in ("unused", "complex_too") if key in options}
            found[name, left_out] = fitted(Net(left_out=left_out, **of_net), **options)
    found["one backward more"] = one_backward_more()
    return found


def of_one_process() -> dict[str, list[float]]:
    net = Net()
    optimizer = net.configure_optimizers()
    for _ in range(2):
        for number, batch in enumerate(data(1, 0)):
            optimizer.zero_grad()
            net.training_step(batch, number).backward()  # type: ignore[union-attr]
            optimizer.step()
    return net.values()


class Curve(LightningModule):
    """Learns by LBFGS, each rank from losses of another size; counts how often its loss was asked for."""

    def __init__(self, line_search: str | None, *, by_hand: bool = False) -> None:
        super().__init__()
        seed_everything(1, verbose=False)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.line_search, self.automatic_optimization = line_search, not by_hand
        self.evaluations = [0] * (SAMPLES // BATCH)
        self.last = 0.0

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        self.evaluations[batch_idx] += 1
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if not self.automatic_optimization:
            self.step_by_hand(batch, batch_idx)
            return None
        loss = self.loss(batch, batch_idx)
        self.last = loss.item()
        self.log("loss", loss)
        return loss

    def step_by_hand(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            self.parameters(), 0.5, max_iter=12, line_search_fn=self.line_search, tolerance_change=0.02
        )

    def outcome(self) -> Any:
        return self.evaluations, [p.flatten().tolist() for p in self.parameters()]


def curve_data(world_size: int, rank: int) -> DataLoader[Any]:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs[1::2] *= 0.01
    whole = TensorDataset(inputs, inputs.sum(1, keepdim=True) * 3)
    return DataLoader(Subset(whole, range(rank, SAMPLES, world_size)), BATCH // world_size)


def learned(curve: Curve) -> Any:
    rank = int(os.environ["RANK"])
    strategy = LockstepDDPStrategy(stall_timeout=20)
    trainer = Trainer(**QUIET, max_epochs=1, precision="64-true", strategy=strategy)
    trainer.fit(curve, curve_data(2, rank))
    if curve.automatic_optimization:
        assert trainer.callback_metrics["loss"] == pytest.approx(curve.last), "what a rank logs stays its own"
    return curve.outcome()


def learned_alone(curve: Curve) -> Any:
    optimizer = curve.double().configure_optimizers()
    for number, (inputs, targets) in enumerate(curve_data(1, 0)):

        def closure(batch: Any = (inputs, targets), number: int = number) -> Any:
            optimizer.zero_grad()
            loss = curve.loss(batch, number)
            loss.backward()
            return loss

        optimizer.step(closure)
    return curve.outcome()


class OneMore(Curve):
    """Runs one backward more in a batch of rank 1, and makes up for it in a later one of rank 0."""

    def __init__(self) -> None:
        super().__init__(None, by_hand=True)

    def step_by_hand(self, batch: Any, batch_idx: int) -> None:
        for _ in range(1 + ((batch_idx, self.global_rank) in ((1, 1), (2, 0)))):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def one_backward_more() -> str:
    strategy = LockstepDDPStrategy(stall_timeout=20, guard="verify")
    with pytest.raises(CollectiveMismatchError) as raised:
        Trainer(**QUIET, max_epochs=1, strategy=strategy).fit(
            OneMore().double(), curve_data(2, int(os.environ["RANK"]))
        )
    return str(raised.value)


@pytest.fixture(scope="module")
def found() -> dict[Any, Any]:
    first, second = run_ranks(2, fits, backend=None, timeout=120)
    assert str(first) == str(second), "the weights stay equal"
    return first  # type: ignore[no-any-return]


def assert_close(weights: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert weights.keys() == expected.keys()
    for name, values in weights.items():
        assert values == pytest.approx(expected[name], abs=1e-6), name


def test_what_is_added_to_a_sparse_embedding_gets_its_whole_gradient(found: dict[Any, Any]) -> None:
    """DDP divides the values of a sparse gradient in place, which may be the gradient of another layer too."""
    assert_close(found["together"], found["of one process"])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_rank_without_a_loss_gives_zero_gradients(found: dict[Any, Any], name: str) -> None:
    assert_close(found[name, "none"], found[name, "times 0"])
    assert found[name, "none"]["tokens.weight"] != found["together"]["tokens.weight"]


@pytest.mark.parametrize("name", [None, "strong_wolfe"])
def test_lbfgs_decides_by_the_loss_of_all_ranks(found: dict[Any, Any], name: str | None) -> None:
    """Each rank asks for the loss as often as the others, and as one process with the whole batch."""
    counts, weights = found["curve", name, "alone"]
    assert len(set(counts)) > 1, "the loss decides how often it is asked for"
    for key in (("curve", name), ("curve", name, "by hand")):
        assert found[key][0] == counts
        for own, expected in zip(found[key][1], weights, strict=True):
            assert own == pytest.approx(expected, abs=1e-9)


def test_gradients_of_different_batches_are_never_added_up_under_verify(found: dict[Any, Any]) -> None:
    """Rank 1 is still in batch 1 while rank 0 has come to batch 2, with a call of the same kind and shape."""
    title, *lines = found["one backward more"].splitlines()
    assert title.startswith("ranks disagree on the batch of collective #")
    places = (line for line in lines if line.startswith("Rank 0 is at epoch 0, "))
    assert re.search(r"batch 2, stage train; rank 1 is at epoch 0, .*batch 1, stage train\.$", next(places))
    assert lines[-1].startswith("In each batch, run as many backward passes and call as many collectives")
