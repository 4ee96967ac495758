"""Micro-batches that another rank runs again: what is found, what is none of it, and what ends the audits."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_lockstep import ConfigurationError
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.replicas import audit
from tests.harness import run_ranks
from tests.models.replicas.fits import EVERY_3, Case, Hooked, fit, of_rank


class Keeps(Callback):
    """Keeps the weights as they are at the end."""

    weights: list[Tensor]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = [*(p.detach().clone() for p in pl_module.state_dict().values()), torch.rand(3)]


def noisy(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + time.perf_counter_ns() % 1000


class FailsOnce:
    """Is wrong in one call alone, the first that an audit makes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * 2 if self.calls == 3 else output


def late(module: nn.Module, inputs: Any, output: Tensor) -> None:
    time.sleep(0.02)


def timed_kernels(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if torch.backends.cudnn.benchmark == audited():
        raise ValueError("audits alone choose no kernels by their time")


def raising(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if audited():
        raise ValueError("only in an audit")


def audited() -> bool:
    """Whether an audit calls."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == audit.__file__:
            return True
        frame = frame.f_back
    return False


class Unsendable(Callback):
    """Puts something into the batch of a rank that cannot be sent."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if current_communicator().rank == 1:
            batch.append(threading.Lock())


def other_device() -> str:
    audit._kind_of = lambda _: f"processor {current_communicator().rank}"  # type: ignore[assignment]
    with pytest.raises(ConfigurationError) as raised:
        fit(Case(options=EVERY_3))
    return str(raised.value)


def fits() -> dict[str, Any]:
    """Fits one after the other, on the same ranks."""
    found: dict[str, Any] = {}
    kept = {}
    for every in (0, 1):
        keeps = Keeps()
        traits = ("dropout", "batchnorm", "statistics")
        case = Case(traits=traits, options={"audit_every_n_steps": every})
        found[f"audits {every}"] = fit(case, callbacks=[keeps])
        kept[every] = keeps.weights
    rank = current_communicator().rank
    return {
        **found,
        "device": fit(Case(fault="device", options=EVERY_3)),
        "once": fit(Case(options=EVERY_3), callbacks=[Hooked(FailsOnce(), 1)]),
        "of rank": fit(Case(options=EVERY_3), callbacks=[Hooked(of_rank, 0, 1, 2)]),
        "warn": fit(Case(fault="device", options={**EVERY_3, "action": "warn"})),
        "noisy": fit(Case(options=EVERY_3), callbacks=[Hooked(noisy, 0, 1, 2)]),
        "timed kernels": fit(Case(options=EVERY_3, trainer={"benchmark": True}), callbacks=[Hooked(timed_kernels, 1)]),
        "late": fit(Case(options=EVERY_3, strategy={"guard": "verify"}), callbacks=[Hooked(late, 1)]),
        "raising": fit(Case(options=EVERY_3), callbacks=[Hooked(raising, 1)]),
        "unsendable": fit(Case(options=EVERY_3), callbacks=[Unsendable()]),
        "other setting": fit(Case(options={"audit_every_n_steps": 3 if rank == 0 else 0})),
        "left no trace": all(map(torch.equal, kept[0], kept[1])),
        "other device": other_device(),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    of_ranks = run_ranks(3, fits, backend="gloo", timeout=240)
    for one in of_ranks:
        for name, outcome in one.items():
            if isinstance(outcome, dict):
                assert outcome["error"] == of_ranks[0][name]["error"], name
    return of_ranks[0]


def test_of_three_ranks_the_device_that_computes_wrongly_is_named(found: dict[str, Any]) -> None:
    for name in ("device", "once"):
        error = found[name]["error"]
        assert error.startswith("rank 1 (host ") and "The device of rank 1 computes wrongly" in error, name


def test_an_audit_leaves_no_trace_and_ranks_that_are_late_or_set_otherwise_take_part(
    found: dict[str, Any],
) -> None:
    assert found["left no trace"]
    for name in ("audits 1", "late", "timed kernels", "other setting"):
        assert found[name] == {"error": None, "lines": [], "steps": 12}, name


def test_with_warn_it_is_told_once(found: dict[str, Any]) -> None:
    lines = found["warn"]["lines"]
    assert found["warn"]["error"] is None and found["warn"]["steps"] == 12
    assert len([line for line in lines if "wrongly" in line]) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("noisy", "torch.use_deterministic_algorithms"),
        ("raising", "on rank 1: ValueError: only in an audit"),
        ("unsendable", "on rank 1: TypeError"),
    ],
)
def test_what_cannot_be_compared_ends_the_audits_and_not_the_run(name: str, text: str, found: dict[str, Any]) -> None:
    assert found[name]["error"] is None and found[name]["steps"] == 12
    (line,) = found[name]["lines"]
    assert "no more audits" in line and text in line


def test_a_step_that_depends_on_what_each_rank_holds_is_no_device(found: dict[str, Any]) -> None:
    (line,) = found["of rank"]["lines"]
    assert found["of rank"]["error"] is None and "what a rank alone holds" in line


def test_devices_of_several_kinds_are_refused_on_all_ranks(found: dict[str, Any]) -> None:
    assert "expected one kind of device" in found["other device"] and "processor 1" in found["other device"]
