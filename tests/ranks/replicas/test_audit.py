"""Micro-batches that another rank runs again: what is found, what is none of it, and what ends the audits."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn

from lightning_lockstep import ConfigurationError, LockstepDDPStrategy
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.replicas import audit
from lightning_lockstep.replicas.audit import Verdict, packed, refuse_audit, unpacked
from lightning_lockstep.steps.capabilities import Capabilities
from tests.common.replicas.fits import Case, fit
from tests.helpers import kill_self, run_ranks, run_ranks_raw

EVERY_3 = {"audit_every_n_steps": 3}


class Hooked(Callback):
    """Lets a module do something else on each of the chosen ranks."""

    def __init__(self, hook: Any, *ranks: int) -> None:
        self.hook, self.ranks = hook, ranks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if current_communicator().rank in self.ranks:
            pl_module.middle[0].register_forward_hook(self.hook)


class Keeps(Callback):
    """Keeps the weights as they are at the end."""

    weights: list[Tensor]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = [*(p.detach().clone() for p in pl_module.state_dict().values()), torch.rand(3)]


def noisy(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + time.perf_counter_ns() % 1000


def of_rank(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + current_communicator().rank


class FailsOnce:
    """Is wrong in one call alone, the first that an audit makes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * 2 if self.calls == 3 else output


def late(module: nn.Module, inputs: Any, output: Tensor) -> None:
    time.sleep(0.05)


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


def of_both_sizes() -> dict[str, Any]:
    """Fits of two ranks, which cannot tell who is right, and of three."""
    return {
        "device": fit(Case(fault="device", options=EVERY_3)),
        "once": fit(Case(options=EVERY_3), callbacks=[Hooked(FailsOnce(), 1)]),
        "of rank": fit(Case(options=EVERY_3), callbacks=[Hooked(of_rank, 0, 1, 2)]),
    }


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
        **of_both_sizes(),
        "warn": fit(Case(fault="device", options={**EVERY_3, "action": "warn"})),
        "noisy": fit(Case(options=EVERY_3), callbacks=[Hooked(noisy, 0, 1, 2)]),
        "timed kernels": fit(
            Case(options=EVERY_3, trainer={"benchmark": True}), callbacks=[Hooked(timed_kernels, 1)]
        ),
        "late": fit(Case(options=EVERY_3, strategy={"guard": "verify"}), callbacks=[Hooked(late, 1)]),
        "raising": fit(Case(options=EVERY_3), callbacks=[Hooked(raising, 1)]),
        "unsendable": fit(Case(options=EVERY_3), callbacks=[Unsendable()]),
        "other setting": fit(Case(options={"audit_every_n_steps": 3 if rank == 0 else 0})),
        "left no trace": all(map(torch.equal, kept[0], kept[1])),
        "other device": other_device(),
    }


def alike(size: int, function: Any) -> dict[str, Any]:
    """What rank 0 returns; all ranks raise the same."""
    of_ranks = run_ranks(size, function, backend="gloo", timeout=240)
    for of_rank in of_ranks:
        for name, outcome in of_rank.items():
            if isinstance(outcome, dict):
                assert outcome["error"] == of_ranks[0][name]["error"], name
    return of_ranks[0]


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    return alike(2, of_both_sizes)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return alike(3, fits)


def test_of_two_ranks_the_pair_is_named(pair: dict[str, Any]) -> None:
    error = pair["device"]["error"]
    assert error.startswith("rank 0, rank 1 compute different values, and nothing says which")
    assert "before batch 3 of this fit" in error and "9 of 9: loss 0, first.weight" in error
    assert "rank 1 (host" in pair["once"]["error"], "by its own results, which are not the same each time"
    assert "A hook, a module, a library or an attribute" in pair["of rank"]["error"]


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
def test_what_cannot_be_compared_ends_the_audits_and_not_the_run(
    name: str, text: str, found: dict[str, Any]
) -> None:
    assert found[name]["error"] is None and found[name]["steps"] == 12
    (line,) = found[name]["lines"]
    assert "no more audits" in line and text in line


def test_a_step_that_depends_on_what_each_rank_holds_is_no_device(found: dict[str, Any]) -> None:
    (line,) = found["of rank"]["lines"]
    assert found["of rank"]["error"] is None and "what each rank alone holds" in line


def test_devices_of_several_kinds_are_refused_on_all_ranks(found: dict[str, Any]) -> None:
    assert "devices of one kind" in found["other device"] and "processor 1" in found["other device"]


def dies() -> None:
    """A fit whose rank 1 dies in the middle of an audit."""

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if audited():
            kill_self()

    fit(Case(options=EVERY_3), callbacks=[Hooked(hook, 1)])


def test_a_rank_that_dies_in_an_audit_ends_the_others() -> None:
    first, second = run_ranks_raw(2, dies, backend="gloo", timeout=60)
    assert second.returncode == -9
    assert not first.ok and not first.killed_by_helper


def test_who_is_wrong() -> None:
    def wrong(*votes: list[int]) -> list[int] | str:
        verdict = Verdict.of(votes)
        return verdict.why_none or verdict.wrong

    assert wrong([1, 1], [2, 2], [1, 1]) == [1]
    assert wrong([1, 1], [2, 2]) == []
    assert wrong([1, 1], [2, 1]) == [1], "it is not always wrong"
    assert wrong([1, 1], [2, 3]) == [1], "it is wrong in another way each time"
    assert wrong([1, 1], [2, 2], [1, 1], [2, 2]) == [], "two kinds of hosts"
    assert wrong([1, 1], [2, 2], [1, 1], [3, 3], [1, 1]) == [1, 3]
    assert "deterministic" in str(wrong([1, 2], [3, 4], [5, 6]))
    assert "alone holds" in str(wrong([1, 1], [2, 2], [3, 3]))


def test_what_is_sent_is_the_batch_and_no_more() -> None:
    whole = torch.arange(1_000_000.0)
    part = whole[10:20].requires_grad_()
    data = packed({"x": part, "again": part, "text": "some", "mask": torch.ones(2, 2).T})
    assert len(data) < 10_000
    back = unpacked(data, torch.device("cpu"))
    assert torch.equal(back["x"], part) and back["x"].requires_grad and back["text"] == "some"
    assert back["mask"].stride() == (1, 2)


@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(),
        SimpleNamespace(step_capabilities=Capabilities(runs_at_once=False)),
        SimpleNamespace(step_capabilities=Capabilities(whole_gradients=False)),
        LockstepDDPStrategy(model_averaging_period=2),
    ],
    ids=["FSDP", "XLA", "DeepSpeed", "model averaging"],
)
def test_it_is_refused_where_no_rank_alone_can_make_a_step(strategy: Any) -> None:
    given: Any = SimpleNamespace(strategy=strategy)
    with pytest.raises(ConfigurationError, match=r"audit_every_n_steps=.* does not work with .*: it "):
        refuse_audit(given)
