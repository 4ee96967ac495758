"""Real fits of two ranks that go wrong in the ways that people meet, and what is said of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_lockstep import CollectiveMismatchError
from lightning_lockstep.callbacks import replica_check
from lightning_lockstep.distributed import current_communicator
from tests.harness import logged, run_ranks
from tests.models.replicas.fits import EVERY_3, Case, Hooked, fit, of_rank


def on(rank: int) -> bool:
    return current_communicator().rank == rank


class Differs(Callback):
    """Gives a rank another weight decay or other weights before the first step."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if on(1) and self.what == "weight decay":
            trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.5
        if on(1) and self.what == "weights":
            torch.nn.init.zeros_(pl_module.last.bias)


class Unfreezes(Callback):
    """Lets a layer learn after DDP has been told that it does not."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            pl_module.first.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": [*pl_module.first.parameters()]})


class NoSync(Callback):
    """Leaves synchronization off from a batch on."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:
            trainer.strategy.model.require_backward_grad_sync = False


class Writes(Callback):
    """Writes gradients after the reduction, or weights, on a rank."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if on(1) and self.what == "gradient":
            pl_module.last.weight.grad.mul_(2)


class Reorders(Callback):
    """Gives a rank two layers of one shape in another order, before DDP is built."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if on(1):
            last = pl_module.last
            del pl_module.last
            pl_module.last = last


def reordered() -> str:
    with pytest.raises(CollectiveMismatchError) as raised:
        fit(Case(traits=("other",), strategy={"guard": "verify"}), callbacks=[Reorders()])
    return str(raised.value)


def silent() -> dict[str, Any]:
    """A fit in which no check of rank 1 reaches rank 0."""
    channel, patience = current_communicator().side_channel, replica_check._AT_THE_END
    post, replica_check._AT_THE_END = channel.post, 0.3
    if on(1):
        channel.post = lambda topic, *args, **options: (  # type: ignore[method-assign]
            None if "replica/" in topic and topic.endswith("/check") else post(topic, *args, **options)
        )
    try:
        with logged("lightning_lockstep.replicas.exchange") as lines:
            return {**fit(Case()), "said": lines}
    finally:
        channel.post, replica_check._AT_THE_END = post, patience  # type: ignore[method-assign]


def cases() -> dict[str, Any]:
    """Fits one after the other, on the same ranks."""
    return {
        "loss.backward": fit(Case(traits=("loss.backward",))),
        "autograd.grad": fit(Case(traits=("autograd.grad",), every=100)),
        "same data": fit(Case(loader="whole stream")),
        "sampler off": fit(Case(loader="indexed"), use_distributed_sampler=False),
        "weight decay": fit(Case(), callbacks=[Differs("weight decay")]),
        "weights": fit(Case(), callbacks=[Differs("weights")]),
        "unfrozen": fit(Case(traits=("unfreezes",)), callbacks=[Unfreezes()]),
        "no_sync": fit(Case(), callbacks=[NoSync()]),
        "no_sync at the end": fit(Case(every=100), callbacks=[NoSync()]),
        "hook": fit(Case(), callbacks=[Writes("gradient")]),
        "stock ddp": fit(Case(traits=("loss.backward",)), plain_strategy="ddp"),
        "warn": fit(Case(traits=("loss.backward",), options={"action": "warn"})),
        "at the end": fit(Case(fault="bit", step=12, every=100)),
        "skipped": fit(Case(fault="skipped step")),
        "buffer": fit(Case(fault="buffer", strategy={"broadcast_buffers": False})),
        "buffers not compared": fit(
            Case(fault="buffer", strategy={"broadcast_buffers": False}, options={"buffers": "none"})
        ),
        "data not compared": fit(Case(loader="whole stream", options={"data": False})),
        "silent": silent(),
        "audit: device": fit(Case(fault="device", options=EVERY_3)),
        "audit: of rank": fit(Case(options=EVERY_3), callbacks=[Hooked(of_rank, 0, 1)]),
        "healthy": fit(Case()),
    }


def all_of_it() -> tuple[dict[str, Any], str]:
    return cases(), reordered()


@pytest.fixture(scope="module")
def found(device: str) -> dict[str, Any]:
    (rank_0, *more), (rank_1, *others) = run_ranks(2, all_of_it, backend="gloo", timeout=240)
    for name, outcome in rank_0.items():
        assert outcome["error"] == rank_1[name]["error"], f"{name}: raised alike"
        assert not rank_1[name]["lines"], "rank 0 alone speaks"
    assert more == others
    return {**rank_0, "another order": more[0]}


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "loss.backward",
            ["after batch 1 of", "found equal at the start", "self.manual_backward(loss)", "first.weight"],
        ),
        ("autograd.grad", ["after batch 1 of", "self.manual_backward(loss)"]),
        (
            "same data",
            ["ranks 0-1 work on the same batches", "Stream is iterable", "iterable_datasets='shard'"],
        ),
        ("sampler off", ["work on the same batches", "leave out use_distributed_sampler=False"]),
        ("weight decay", ["before the first step", "optimizer 0, group 0, weight_decay", "0.5"]),
        ("weights", ["last.bias", "before the first batch", "They were never found equal."]),
        ("unfrozen", ["first.weight", "frozen or missing when the model was wrapped"]),
        (
            "no_sync",
            ["after batch 10 of", "found equal after batch 5", "require_backward_grad_sync is False"],
        ),
        ("hook", ["last.weight", "changed on some ranks after the reduction"]),
        ("stock ddp", ["self.manual_backward(loss)"]),
        ("at the end", ["after batch 12 of", "after batch 4", "Memory or arithmetic of a device"]),
        (
            "no_sync at the end",
            ["after batch 12 of", "1. Settings and optimizer steps are equal, and so are"],
        ),
        ("skipped", ["In the minority: rank 1.", "stepped on some ranks only", "[3] on rank 1"]),
        ("buffer", ["scale", "Only buffers differ", "In the minority: rank 1."]),
    ],
)
def test_what_goes_wrong_is_named_with_its_reason(name: str, texts: list[str], found: dict[str, Any]) -> None:
    error = found[name]["error"]
    assert error is not None
    for text in texts:
        assert text in error, error


def test_layers_in_another_order_are_named_by_verify_before_ddp_is_built(found: dict[str, Any]) -> None:
    error = found["another order"]
    assert "last.weight (1, 16) float32 trained" in error and "other.weight (1, 16)" in error


def test_an_audit_of_two_ranks_names_the_pair(found: dict[str, Any]) -> None:
    error = found["audit: device"]["error"]
    assert error.startswith("rank 0, rank 1 compute different values, and no majority agrees")
    assert "before batch 3 of this fit" in error and "9 of 9: loss 0, first.weight" in error
    assert "A hook, a module, a library or an attribute" in found["audit: of rank"]["error"]


def test_with_warn_the_run_goes_on_and_each_difference_is_told_once(found: dict[str, Any]) -> None:
    outcome = found["warn"]
    assert outcome["error"] is None and outcome["steps"] == 12
    assert sum("self.manual_backward(loss)" in line for line in outcome["lines"]) == 1, outcome["lines"]


def test_a_rank_from_which_nothing_comes_stops_nobody_and_is_named(found: dict[str, Any]) -> None:
    outcome = found["silent"]
    assert outcome["error"] is None and outcome["steps"] == 12
    (line,) = outcome["said"]
    assert "nothing came from rank 1 within" in line


@pytest.mark.parametrize("name", ["buffers not compared", "data not compared", "healthy"])
def test_no_alarm(name: str, found: dict[str, Any]) -> None:
    assert found[name] == {"error": None, "lines": [], "steps": 12}
