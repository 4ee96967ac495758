"""ReplicaCheck where a model is divided and has copies: each part is compared between the ranks that hold it."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.sharded_state import ranks_of_part
from lightning_lockstep.replicas.contents import Contents
from tests.harness import run_ranks
from tests.models.replicas.fits import Case, Net, fit, held


def on(rank: int) -> bool:
    return current_communicator().rank == rank


class WritesItself(Net):
    """Writes one value of what a rank holds of a weight, in a hook."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and on(3):
            held([self.middle[0].weight])[0][0, 0] += 1


class DividesItself(Net):
    """As one writes it for Lightning's ModelParallelStrategy, with a mesh that has copies."""

    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for part in (self.middle, self):
                fully_shard(part, mesh=mesh)


class Late(Callback):
    """Keeps rank 2 behind the others after each batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02 if on(2) else 0)


class Writes(Callback):
    """Writes a gradient of rank 1 after the reduction, or a weight of it before the first batch."""

    def __init__(self, what: str) -> None:
        self.what = what

    @torch.no_grad()
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.what == "weight" and on(1):
            held([pl_module.first.weight])[0].mul_(2)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.what == "gradient" and on(1):
            pl_module.first.weight.grad.to_local().mul_(2)


def holders() -> list[tuple[int, ...]]:
    """The ranks that hold what this one does of tensors on a mesh of two by two, and on one of some ranks."""
    mesh, some = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [1, 3])
    whole, placements = torch.zeros(4), [Replicate(), Shard(0)]
    divided = [distribute_tensor(whole, mesh, both) for both in itertools.product(placements, repeat=2)]
    return [ranks_of_part(one) for one in (*divided, distribute_tensor(whole, some, [Replicate()]))]


def of_divided_weights() -> tuple[str, int]:
    module = nn.Linear(4, 4)
    module.register_buffer("steps", torch.zeros(()))
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    given: Any = SimpleNamespace(strategy=SimpleNamespace(model=module), optimizers=[])
    contents = Contents(given, module, optimizer_state=True, buffers="auto")
    return contents.left_out, len(contents.sections()["parameters"])


def cases() -> dict[str, Any]:
    """Fits one after the other, on the same ranks."""
    return {
        "healthy": fit(Case(hsdp=True, traits=("dropout",), trainer={"accumulate_grad_batches": 2})),
        "healthy, own": fit(Case(hsdp=True, every=1), make=DividesItself),
        "hook": fit(Case(hsdp=True), make=WritesItself),
        "state": fit(Case(hsdp=True, fault="bit of state", rank=2)),
        "skipped": fit(Case(hsdp=True, fault="skipped step", rank=3)),
        "late": fit(Case(hsdp=True, fault="layer", rank=2, every=1), callbacks=[Late()]),
        "own": fit(Case(hsdp=True, fault="bit", step=12, every=100, target=2, rank=0), make=DividesItself),
        "gradient": fit(Case(hsdp=True), callbacks=[Writes("gradient")]),
        "start": fit(Case(hsdp=True), callbacks=[Writes("weight")]),
        "warn": fit(Case(hsdp=True, fault="rate", rank=3, options={"action": "warn"})),
    }


def all_of_it() -> tuple[dict[str, Any], Any, Any]:
    return cases(), holders(), of_divided_weights()


@pytest.fixture(scope="module")
def of_ranks() -> list[Any]:
    return run_ranks(4, all_of_it, timeout=240)


@pytest.fixture(scope="module")
def found(of_ranks: list[Any]) -> dict[str, Any]:
    of_fits = [fits for fits, *_ in of_ranks]
    for name in of_fits[0]:
        assert len({one[name]["error"] for one in of_fits}) == 1, f"{name}: raised alike"
    return of_fits[0]


def test_which_ranks_hold_the_same(of_ranks: list[Any]) -> None:
    everyone = (0, 1, 2, 3)
    assert [holders for _, holders, _ in of_ranks] == [
        [everyone, (0, 2), (0, 1), (0,), ()],
        [everyone, (1, 3), (0, 1), (1,), (1, 3)],
        [everyone, (0, 2), (2, 3), (2,), ()],
        [everyone, (1, 3), (2, 3), (3,), (1, 3)],
    ]


def test_of_weights_that_fully_shard_divides_none_is_compared(of_ranks: list[Any]) -> None:
    said = "weights that one rank alone holds are not compared: the strategy divides them"
    assert [divided for *_, divided in of_ranks] == [(said, 0)] * 4


@pytest.mark.parametrize("name", ["healthy", "healthy, own"])
def test_healthy_runs_give_no_alarm(name: str, found: dict[str, Any]) -> None:
    assert found[name]["error"] is None and found[name]["lines"] == []
    assert found[name]["steps"] == 12


PAIR = "which hold the same part of the model, differ in their"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "hook",
            [f"ranks 1,3, {PAIR} parameters", "middle.0.weight  rank 1, rank 3", "a hook or"],
        ),
        ("hook", ["after batch 4 of", "equal after batch 1.", "No majority agrees"]),
        ("state", [f"ranks 0,2, {PAIR}", "exp_avg of first.weight"]),
        ("skipped", [f"ranks 1,3, {PAIR}", "In the minority: rank 3.", "stepped on some ranks only"]),
        ("late", [f"ranks 0,2, {PAIR} parameters", "first.weight"]),
        ("own", [f"ranks 0,2, {PAIR} parameters", "middle.0.weight", "Memory or arithmetic of a device"]),
        ("gradient", [f"ranks 1,3, {PAIR}", "gradients of first.weight differed", "for example by a hook."]),
        ("start", [f"ranks 1,3, {PAIR} parameters, found before the first batch", "first.weight"]),
    ],
)
def test_what_goes_wrong_is_named_with_the_ranks_that_hold_the_part(
    name: str, texts: list[str], found: dict[str, Any]
) -> None:
    error = found[name]["error"]
    assert error is not None
    for text in texts:
        assert text in error, error


def test_with_warn_the_settings_and_then_the_parts_are_told(found: dict[str, Any]) -> None:
    first, second = found["warn"]["lines"]
    assert found["warn"]["error"] is None and found["warn"]["steps"] == 12
    assert "the ranks differ in their settings" in first
    assert f"ranks 1,3, {PAIR} parameters" in second
