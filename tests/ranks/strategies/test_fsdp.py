"""LockstepFSDPStrategy: what a Trainer and a module may ask for either works, with the weights of one process, or is
refused before a rank starts, with its reason."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.loops import utilities
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_lockstep import ConfigurationError, FP32Modules, LockstepError
from lightning_lockstep._lightning import (
    ModelPruning,
    OnExceptionCheckpoint,
    Precision,
    Trainer,
    WeightAveraging,
)
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.launchers import subprocess_script
from lightning_lockstep.strategies import fsdp_units
from tests.harness import run_ranks, run_ranks_raw
from tests.models.strategies.fsdp_models import (
    QUIET,
    Block,
    Net,
    difference,
    fit,
    fsdp,
    loader,
    rows,
    weights,
)

# -- What works: the weights after a fit on two ranks are those of one process with the same batches --


class Tied(Net):
    """Its first and its last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.first.weight


class TiedUnits(Net):
    """Two of its blocks share a weight, so neither can be divided alone."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.blocks[0].linear.weight = self.blocks[1].linear.weight


class Manual(Net):
    """Two optimizers that are toggled, a backward for each, in manual optimization; no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.temperature
        self.temperature = 1.0
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        lower = [*self.first.parameters(), *self.blocks[0].parameters()]
        upper = [*self.blocks[1].parameters(), *self.head.parameters()]
        return [torch.optim.Adam(lower, 0.01), torch.optim.SGD(upper, 0.1)]


class CompiledBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


class CompiledNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(nn.Sequential(*self.blocks), backend="eager")
        del self.blocks
        self.blocks = [self.body]


class Even(nn.Linear):
    """Its first values do not depend on which layer was made before."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-0.5, 0.7, self.weight.numel()).view_as(self.weight))
            self.bias.zero_()


class MadeLater(Net):
    """Its layers come from ``configure_model``; on ``meta``, so that no rank ever holds all of it."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.blocks, self.head

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            with torch.device("meta" if self.trainer.world_size > 1 else "cpu"):
                self.first, self.head = Even(8, 8), Even(8, 4)
                self.blocks = nn.ModuleList(Block() for _ in range(2))
                for block in self.blocks:
                    block.linear = Even(8, 8)


class DividesItself(Net):
    """As one writes it for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        if self.trainer.world_size > 1:
            for part in (*self.blocks, self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


class OwnMeans(Net):
    """Calls its layers from the step, not by ``forward``."""

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x) * self.temperature, batch[1])


class Peeks(Net):
    """Calls its layers without gradients before the first step, and between a backward and the optimizer's step."""

    def on_train_start(self) -> None:
        self(torch.ones(2, 8, device=self.device))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self(torch.ones(2, 8, device=self.device))


class Differentiates(OwnMeans):
    """Second derivatives, and a layer in no unit that is called after a backward within the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = batch[0].clone().requires_grad_()
        loss = self.loss((inputs, batch[1]))
        (first,) = torch.autograd.grad(loss * len(inputs), inputs, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(3).sum(), inputs, create_graph=True)
        return loss + second.pow(2).mean() + self.head(inputs + first).pow(2).mean()


class DifferentiatesByHand(Manual):
    """A penalty on the gradient, with manual optimization."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for part in (self.first, *self.blocks, self.head):
            if isinstance(part, FSDPModule):
                part.set_reshard_after_backward(False)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            inputs = batch[0].clone().requires_grad_()
            loss = self.loss((inputs, batch[1]))
            (first,) = torch.autograd.grad(loss * len(inputs), inputs, create_graph=True)
            self.manual_backward(loss + first.pow(2).mean())
            optimizer.step()


class FrozenInHalf(Net):
    """Its first layer computes in 16 bits and is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first.to(torch.bfloat16).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0].to(torch.bfloat16), batch[1]))

    def on_fit_start(self) -> None:
        self.first.register_forward_hook(lambda module, given, output: output.float())


class Thaws(Net):
    """A whole block is frozen, and a part of another; the block is trained from the fourth step to the sixth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].norm.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step in (3, 6):
            self.blocks[0].requires_grad_(self.global_step == 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class Follows(Net):
    """A copy of its first layer and of a block follows them, written between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = copy.deepcopy(nn.ModuleList([self.first, self.blocks[0]])).requires_grad_(False)

    def follow(self) -> None:
        ours = [*self.first.parameters(), *self.blocks[0].parameters()]
        for copied, parameter in zip(self.copies.parameters(), ours, strict=True):
            copied.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.copies[1](self.copies[0](batch[0]))
        return self.loss((batch[0] + 0.1 * target, batch[1]))

    def on_train_batch_end(self, *args: Any) -> None:
        self.follow()


Works = dict[str, tuple[Callable[[], Net], dict[str, Any], dict[str, Any]]]

#: What: (model, options of the strategy, of the Trainer).
MODELS: Works = {
    "layers called from the step": (OwnMeans, {}, {}),
    "layers called in between": (Peeks, {}, {}),
    "second derivatives": (Differentiates, {}, {}),
    "second derivatives, manual optimization": (DifferentiatesByHand, {}, {}),
    "frozen in another dtype": (FrozenInHalf, {}, {}),
    "frozen and trained in turn": (Thaws, {}, {}),
    "a copy that follows": (Follows, {}, {}),
    "made in configure_model, on meta": (MadeLater, {}, {}),
    "divided by configure_model itself": (DividesItself, {}, {}),
    "shared weights": (Tied, {}, {}),
    "shared weights of units": (TiedUnits, {"shard": "auto"}, {}),
    "manual optimization, several optimizers toggled": (Manual, {}, {}),
}
OPTIONS: Works = {
    "shard by size": (Net, {"shard": "auto"}, {}),
    "shard by classes": (Net, {"shard": ["Block", "Linear"]}, {}),
    "shard by a function": (Net, {"shard": lambda name, module: name == "blocks.1"}, {}),
    "whole parameters kept until the backward": (Net, {"reshard_after_forward": False}, {}),
    "offload": (Net, {"offload": "cpu"}, {}),
    "activation checkpointing": (Net, {"activation_checkpointing": True}, {}),
    "replicas": (Net, {"mesh": {"replicate": 2}}, {}),
    "compiled blocks": (CompiledBlocks, {}, {}),
    "a compiled part": (CompiledNet, {}, {}),
    "accumulated, clipped by norm": (Net, {}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
}


def working_fits(table: str) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    fsdp_units.LEAST_UNIT = 100
    ranks = int(os.environ["WORLD_SIZE"])
    for name, (make, options, settings) in {"models": MODELS, "options": OPTIONS}[table].items():
        if ranks == 1 and name == "replicas":
            continue
        try:
            reference = weights(fit(make, 1, **settings))
            trainer = fit(make, ranks, fsdp(**options), **settings)
            found = weights(trainer)
            if options.get("activation_checkpointing"):  # which calls the blocks once more in the backward
                reference, found = ({k: v for k, v in one.items() if "calls" not in k} for one in (reference, found))
            answers[name] = difference(reference, found) if trainer.is_global_zero else 0.0
        except Exception:
            answers[name] = traceback.format_exc()[-3000:]
    return answers


@pytest.mark.parametrize("table", ["models", "options"])
def test_fits_have_the_weights_of_one_process(table: str, device: str) -> None:
    # Two ranks could share a card only over gloo, over which the strategy refuses a card.
    for answers in run_ranks(1 if device == "cuda" else 2, working_fits, table, backend=None, timeout=240):
        wrong = [f"{what}: {one}" for what, one in answers.items() if isinstance(one, str) or one > 1e-5]
        assert not wrong, "\n".join(wrong)


# -- What is refused, before a rank starts --


class ManualWithOwn(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(1))


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8, sparse=True)
        self.names = nn.Embedding(5, 8, max_norm=1.0)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient * 0.1)
        self.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "average weights": (
        lambda: start(Net, callbacks=[WeightAveraging()]),
        "WeightAveraging needs the whole model",
    ),
    "pruning": (
        lambda: start(Net, callbacks=[ModelPruning("l1_unstructured")]),
        "ModelPruning needs the whole model",
    ),
    "a save by ranks that raise": (
        lambda: start(Net, callbacks=[OnExceptionCheckpoint("folder")]),
        "OnExceptionCheckpoint saves after a rank has raised",
    ),
    "sparse gradients": (
        lambda: start(Sparse),
        "words has sparse=True and max_norm=None: expected False.*names has sparse=False and max_norm=1.0",
    ),
    "hooks for gradients": (
        lambda: start(Hooked),
        "Hooked: Hooks for the gradients of first.weight, head.weight: expected none",
    ),
    "a precision of other libraries": (
        lambda: fsdp().resolve_precision(Precision(), "transformer-engine", "cuda"),
        "precision='transformer-engine': expected one of 64-true, 32-true",
    ),
    "a mesh of another size": (
        lambda: start(Net, fsdp(mesh={"shard": 2, "replicate": 2})),
        "mesh={'shard': 2, 'replicate': 2} with 2 ranks: expected sizes whose product",
    ),
    "a weight shared by chosen units": (
        lambda: start(TiedUnits),
        "TiedUnits: blocks.0.linear.weight is shared by Block and Block, which are separate parts",
    ),
    "a parameter that nothing gathers": (
        lambda: start(ManualWithOwn),
        "ManualWithOwn: own belongs to the LightningModule itself, and with manual optimization",
    ),
    "wrong options": (
        lambda: fsdp(shard=3, offload="disk", mesh={"rows": 2}, state_dict="whole", activation_checkpointing="yes"),
        "shard=3: expected 'auto'.*offload='disk'.*state_dict='whole'.*activation_checkpointing='yes'.*mesh=",
    ),
    "gloo on GPUs": (
        lambda: fsdp(process_group_backend="gloo", parallel_devices=[torch.device("cuda", 0)])._configure_launcher(),
        "process_group_backend='gloo' on GPUs: expected 'nccl'",
    ),
    "parts from ranks that were forked": (
        lambda: fsdp(state_dict="sharded", start_method="fork"),
        "start_method='fork' with state_dict='sharded': expected 'popen'",
    ),
    "an option of another strategy": (lambda: fsdp(static_graph=True), "has no option 'static_graph'"),
}


def start(make: Callable[[], Net], strategy: Any = None, **options: Any) -> None:
    trainer = Trainer(**{**QUIET, "devices": 2, "fast_dev_run": 1, **options}, strategy=strategy or fsdp())
    trainer.fit(make(), DataLoader(loader(1).dataset, 4))


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_before_a_rank_starts(what: str) -> None:
    begin, message = REFUSED[what]
    with pytest.raises(ConfigurationError) as caught:
        begin()
    found = str(caught.value).replace("\n", " ")
    for part in message.split(".*"):
        assert part in found, found
    assert subprocess_script._started is None


# -- What can be known only once the ranks have the model is refused on all of them alike --


class StaleOptimizer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = list(self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.kept, 0.1)


class LeavesOut(DividesItself):
    def configure_model(self) -> None:
        fully_shard(self.blocks[0], mesh=self.device_mesh["data_parallel"])


class NoReset(Net):
    def configure_model(self) -> None:
        with torch.device("meta"):
            self.extra = Bare()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class OtherOnRank1(Net):
    def __init__(self) -> None:
        super().__init__(blocks=2 + int(os.environ["RANK"]))


class LaterLayer(Net):
    def on_fit_start(self) -> None:
        self.later = nn.Linear(8, 8)


class NoLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class Whole(Net):
    """Its optimizer looks at whole parameters."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), 0.1)


def late_refusals() -> dict[str, str]:
    answers = {}
    plain = Net()
    fit(lambda: plain, 2, fsdp())
    for name, make, options, settings in (
        ("stale", StaleOptimizer, {}, {}),
        ("left out", LeavesOut, {}, {}),
        ("no reset", NoReset, {}, {}),
        ("other model", OtherOnRank1, {}, {}),
        ("no such class", Net, {"shard": "Blokc"}, {}),
        ("other precision", lambda: plain, {}, {"precision": "bf16-mixed"}),
        ("no such module", Net, {}, {"callbacks": [FP32Modules(["bloks.0"])], "precision": "bf16-mixed"}),
        *((one, partial(Whole, getattr(torch.optim, one)), {}, {}) for one in ("LBFGS", "Rprop", "Adafactor")),
        ("a later layer", LaterLayer, {}, {}),
        ("no loss", NoLoss, {}, {}),
    ):
        try:
            fit(make, 2, fsdp(**options), **settings)
            answers[name] = "nothing"
        except LockstepError as error:  # noqa: PERF203
            answers[name] = str(error)
    return answers


def uneven_validation() -> str:
    """Rank 1 has a batch more."""
    rank = int(os.environ["RANK"])
    trainer = Trainer(**QUIET, devices=2, strategy=fsdp(stall_timeout=2.0))
    try:
        trainer.validate(Net(), DataLoader(rows(16 + 4 * rank), 4), verbose=False)
    except LockstepError as error:
        return str(error)
    return "nothing"


def test_what_cannot_work_is_refused_on_all_ranks_alike() -> None:
    first, second = run_ranks(2, late_refusals, backend=None, timeout=120)
    assert first == second
    for name, expected in {
        "stale": "gives an optimizer tensors that are not parameters of the module",
        "left out": "temperature, first.weight",
        "no reset": "Bare was made on the device 'meta' and has no reset_parameters",
        "other model": "ranks disagree on the parameters and buffers that one model has on all of them",
        "no such class": "shard='Blokc': expected names of classes among its modules: Block, LayerNorm",
        "other precision": "precision='bf16-mixed', but an earlier run divided this module for precision='32-true'",
        "no such module": "modules='bloks.0': expected the name of a module of Net",
        "LBFGS": "LBFGS needs operations that torch does not have for divided parameters",
        "Rprop": "Rprop needs operations",
        "Adafactor": "Adafactor needs operations",
        "a later layer": "later.weight, later.bias: trained, but not divided",
        "no loss": "training_step returned no loss: expected one on every rank",
    }.items():
        assert expected in first[name], (name, first[name])


def test_a_rank_with_a_validation_batch_more_does_not_wait_forever() -> None:
    first, second = (one.value for one in run_ranks_raw(2, uneven_validation, backend=None, timeout=60))
    assert first == second, "both raise: the rank that has ended is in no call of gloo"
    assert first.startswith("ranks disagree on which operation comes next")
    assert "gather in 'what ranks have logged" in first and "each call of a layer is an all_gather" in first


# -- What the ranks send in a step, and keep --


def fits_that_count() -> dict[str, tuple[int, int]]:
    counts = {}
    for name, (make, options, batches) in COUNTED.items():
        with reductions() as reduced, gathers() as gathered:
            fit(make, 2, fsdp(**options), max_epochs=1, accumulate_grad_batches=batches)
        counts[name] = len(gathered), len(reduced)
    net = Net()
    # With gloo Lightning leaves inference mode out by itself.
    with gathers() as gathered, patch.object(utilities, "_distributed_is_initialized", lambda: False):
        Trainer(**QUIET, devices=2, strategy=fsdp()).validate(net, loader(2), verbose=False)
    counts["evaluation"] = len(gathered), 0
    fit(lambda: net, 2, fsdp(), max_epochs=1)  # it can still be trained
    return counts


COUNTED: dict[str, tuple[type[Net], dict[str, Any], int]] = {
    "stage 3": (Net, {}, 1),
    "stage 2": (Net, {"reshard_after_forward": False}, 1),
    "layers called from the step": (OwnMeans, {}, 1),
    "accumulated": (Net, {}, 2),
}


class Draws(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn = float(torch.rand(()))


def draws() -> int:
    """How many different numbers the ranks have drawn in the same step."""
    net = Draws()
    fit(lambda: net, 2, fsdp(), max_epochs=1)
    return len(set(current_communicator().gather(net.drawn)))


def counted() -> dict[str, Any]:
    return {"sent": fits_that_count(), "uneven": uneven_fits(), "draws": draws()}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    first, second = run_ranks(2, counted, backend=None, timeout=120)
    assert first == second
    return first  # type: ignore[no-any-return]


def test_a_step_gathers_and_reduces_each_part_as_seldom_as_can_be(found: dict[str, Any]) -> None:
    """Two units, and the rest: that is gathered once for a step, and once for a whole evaluation."""
    steps = 4
    assert found["sent"] == {
        "stage 3": ((1 + 2 * 2) * steps, 3 * steps),
        "stage 2": ((1 + 2) * steps, 3 * steps),
        "layers called from the step": ((1 + 2 * 2) * steps, 3 * steps),
        "accumulated": ((1 + 2 * 2) * steps, 3 * steps // 2),
        "evaluation": (1 + 2 * steps, 0),
    }


def test_random_numbers_follow_the_rank(found: dict[str, Any]) -> None:
    assert found["draws"] == 2


# -- Precision --


class Wide(Net):
    """What its second block computes in is noted inside it."""

    def make_layers(self, blocks: int = 2) -> None:
        super().make_layers(blocks)
        self.blocks[1].linear = NotesDtype(8, 8)

    @property
    def noted(self) -> tuple[str, str]:
        linear: Any = self.blocks[1].linear
        return linear.noted


class Normed(Wide):
    """It has batch normalization in its units, whose kernels take no weights of 16 bits."""

    def make_layers(self, blocks: int = 2) -> None:
        super().make_layers(blocks)
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(8)


class NotesDtype(nn.Linear):
    noted = ("", "")

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        self.noted = (str(self.weight.dtype)[6:], str(output.dtype)[6:])
        return output


def precision_fits() -> tuple[dict[str, Any], Any]:
    answers: dict[str, Any] = {}
    for name in ("64-true", "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"):
        net = Wide()
        with reductions() as called:
            trainer = fit(lambda net=net: net, 2, fsdp(), precision=name, max_epochs=1)
        reduced = sorted(set(called))
        kept = str(net.blocks[0].linear.weight.dtype)[6:]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        answers[name] = (sorted(net.dtypes), net.noted, kept, reduced, scaler is not None)
    for name, options, settings, make in (
        ("compute", {"reduce_dtype": "compute"}, {}, Wide),
        ("FP32Modules", {}, {"callbacks": [FP32Modules(["blocks.1.linear"])]}, Wide),
        ("FP32Modules of a unit", {}, {"callbacks": [FP32Modules(["blocks.1"])]}, Wide),
        ("batch normalization", {}, {}, Normed),
    ):
        net = make()
        with reductions() as called:
            fit(lambda net=net: net, 2, fsdp(**options), precision="bf16-mixed", max_epochs=1, **settings)
        reduced = sorted(set(called))
        answers[name] = (net.noted, reduced)
    return answers, overflowing_fit()


@contextmanager
def calls(*names: str) -> Iterator[list[str]]:
    """The dtypes of what these operations are called with meanwhile; a release of torch has some of them."""
    called: list[str] = []

    def noting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            called.append(str([*args, *kwargs.values()][0].dtype)[6:])
            return operation(*args, **kwargs)

        return noted

    there = {name: noting(getattr(torch.distributed, name)) for name in names if hasattr(torch.distributed, name)}
    with patch.multiple(torch.distributed, **there):
        yield called


# In torch 2.9, and 2.13.
reductions = partial(calls, "reduce_scatter_tensor", "reduce_scatter_single")
gathers = partial(calls, "all_gather_into_tensor", "all_gather_single")


@pytest.fixture(scope="module")
def precise() -> Any:
    first, second = run_ranks(2, precision_fits, backend=None, timeout=120)
    assert first == second
    return first


def test_each_precision_does_what_it_says(precise: Any) -> None:
    half, brain = "float16", "bfloat16"
    assert precise[0] == {
        # dtype of the blocks' outputs, of a weight and an output inside one, of what is kept, of reductions; scaled
        "64-true": (["float64"], ("float64", "float64"), "float64", ["float64"], False),
        "32-true": (["float32"], ("float32", "float32"), "float32", ["float32"], False),
        "16-mixed": ([half], (half, half), "float32", ["float32"], True),
        "bf16-mixed": ([brain], (brain, brain), "float32", ["float32"], False),
        "16-true": ([half], (half, half), half, ["float32"], False),
        "bf16-true": ([brain], (brain, brain), brain, ["float32"], False),
        "compute": ((brain, brain), [brain, "float32"]),
        "FP32Modules": (("float32", "float32"), ["float32"]),
        "FP32Modules of a unit": (("float32", "float32"), ["float32"]),
        "batch normalization": ((brain, brain), ["float32"]),
    }


def overflowing_fit() -> Any:
    trainer = fit(Net, 2, fsdp(), precision="16-mixed", max_epochs=1)
    calm = trainer.precision_plugin.state_dict()["scale"]
    net = OverflowsIn()
    trainer = fit(lambda: net, 2, fsdp(), precision="16-mixed", max_epochs=1)
    found = weights(trainer)
    finite = all(bool(value.isfinite().all()) for value in found.values()) if trainer.is_global_zero else True
    return calm, trainer.precision_plugin.state_dict()["scale"], finite


class OverflowsIn(Net):
    """The part of the gradient that rank 1 keeps of one bias is infinite in one step; that of rank 0 is not."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1:
            bias: Any = self.blocks[0].linear.bias
            if self.global_rank == 1:
                bias.grad.to_local().fill_(float("inf"))


def test_all_ranks_see_an_overflow_of_one_ranks_part_alike(precise: Any) -> None:
    calm, scale, finite = precise[1]
    assert scale == calm / 2 and finite


# -- Ranks that have different numbers of batches --


def uneven_fits() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    answers: dict[str, Any] = {}
    for policy in ("truncate", "join"):
        trainer = Trainer(**QUIET, devices=2, max_epochs=1, strategy=fsdp(uneven_inputs=policy))
        data = loader(1, batch=4, count=8 + 4 * rank)
        trainer.fit(Net(), data)
        found = weights(trainer)
        finite = all(bool(value.isfinite().all()) for value in found.values() if value is not None)
        answers[policy] = (trainer.global_step, finite)
    return answers


def test_ranks_with_different_amounts_of_data(found: dict[str, Any]) -> None:
    assert found["uneven"] == {"truncate": (2, True), "join": (3, True)}
