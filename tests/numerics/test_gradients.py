"""The check of many gradients: few shared storages, as DDP's buckets are, and the gradients themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep.numerics import gradients
from lightning_lockstep.numerics.gradients import GradientCheck
from tests.helpers import run_ranks

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Number of tensors of each call of the check that goes tensor by tensor."""
    calls: list[int] = []
    original = gradients.fused_flags

    def noted(tensors: Any) -> Any:
        calls.append(len(tensors))
        return original(tensors)

    monkeypatch.setattr(gradients, "fused_flags", noted)
    yield calls


def bucket(*, count: int = 10, size: int = 6, spare: int = 4) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor and views of it; the last ``spare`` elements belong to no view."""
    flat = torch.randn(count * size + spare, generator=torch.Generator().manual_seed(0))
    return flat, [flat.as_strided((size,), (1,), n * size) for n in range(count)]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_storage_is_read_in_one_go_and_a_bad_value_in_a_view_is_found(
    value: float, fused: list[int]
) -> None:
    flat, views = bucket()
    before = flat.clone()
    check = GradientCheck()
    for _ in range(3):
        assert not check.start(views).result()
    assert fused == []
    assert torch.equal(flat, before)
    views[7][2] = value
    assert check.start(views).result()
    assert fused == [10], "the views decide"


def test_what_a_storage_holds_beside_the_tensors_does_not_count() -> None:
    flat, views = bucket(count=20)
    mine, others = views[:12], views[12:]
    checks = GradientCheck(), GradientCheck()
    others[3][0] = NAN
    flat[-1] = INF
    for _ in range(8):
        assert not checks[0].start(mine).result()
        assert checks[1].start(others).result()
    others[3][0] = 0.0
    assert not checks[1].start(others).result()
    mine[0][0] = NAN
    assert checks[0].start(mine).result()


def test_too_many_false_alarms_and_the_storages_are_left_alone(fused: list[int]) -> None:
    flat, views = bucket()
    flat[-1] = NAN
    check = GradientCheck()
    for _ in range(10):
        assert not check.start(views).result()
    fused.clear()
    flat[-1] = 0.0
    assert not check.start(views).result()
    assert fused == [10]


def test_large_finite_values_are_no_alarm() -> None:
    _, views = bucket()
    for view in views:
        view.fill_(3e38)
    assert not GradientCheck().start(views).result()


def test_tensors_that_moved_are_found_again() -> None:
    flat, views = bucket()
    check = GradientCheck()
    assert not check.start(views).result()
    # One of them becomes a tensor of its own, another is missing, all are in a new storage, the old one is bad.
    alone = [*views[:4], torch.tensor([NAN]), *views[5:]]
    assert check.start(alone).result()
    assert not check.start(views[1:]).result()
    _, moved = bucket()
    flat.fill_(NAN)
    assert not check.start(moved).result()
    moved[9][5] = NAN
    assert check.start(moved).result()
    assert check.start([]).result() is False


def test_a_storage_reused_in_place_of_another_is_noticed() -> None:
    """Same tensors, and their memory exchanged below them."""
    _, views = bucket()
    check = GradientCheck()
    assert not check.start(views).result()
    bad = torch.full((6,), NAN)
    views[3].data = bad
    assert check.start(views).result()


def test_nothing_is_kept_alive() -> None:
    import weakref

    flat, views = bucket()
    reference = weakref.ref(flat.untyped_storage())
    check = GradientCheck()
    assert not check.start(views).result()
    del flat, views
    assert reference() is None


@pytest.mark.parametrize("kind", ["sparse", "two dtypes", "few", "a large storage"])
def test_what_shares_no_few_storages_is_checked_tensor_by_tensor(kind: str, fused: list[int]) -> None:
    _, views = bucket()
    tensors = {
        "sparse": [*views, torch.eye(3).to_sparse()],
        "two dtypes": [*views, *(view.view(torch.int32).view(torch.float32) for view in views[:1])],
        "few": [torch.randn(3) for _ in range(10)],
        "a large storage": [torch.zeros(1000).as_strided((1,), (1,), n) for n in range(10)],
    }[kind]
    if kind == "two dtypes":
        tensors += [views[0].view(torch.bfloat16)]
    check = GradientCheck()
    assert not check.start(tensors).result()
    assert fused
    tensors[0].view(-1)[0] = NAN
    assert check.start(tensors).result()


def ddp_buckets() -> list[Any]:
    """Two optimizers over one DDP model: what each check finds, and whether it reads the buckets."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    first, second = list(model[:10].parameters()), list(model[10:].parameters())
    answers: list[Any] = []
    checks = GradientCheck(), GradientCheck()
    for step in range(6):
        model.zero_grad(set_to_none=True)
        loss = wrapped(torch.randn(4, 8)).square().mean()
        # Bad on rank 1 only, in the gradient of one parameter; DDP's mean carries it to rank 0.
        bad = model[15].weight if step == 3 and rank == 1 else None
        handle = bad.register_hook(lambda g: g * NAN) if bad is not None else None
        loss.backward()
        if handle is not None:
            handle.remove()
        if step == 4:
            model[2].weight.grad = None
        if step == 5:
            model[3].weight.grad = torch.full((8, 8), INF)
        answers.append(
            [
                check.start([p.grad for p in parameters if p.grad is not None]).result()
                for check, parameters in zip(checks, (first, second), strict=True)
            ]
        )
    both = GradientCheck()
    both.start([p.grad for p in model.parameters() if p.grad is not None])
    calls: list[int] = []
    original, gradients.fused_flags = gradients.fused_flags, lambda t: calls.append(len(t)) or []
    model.zero_grad(set_to_none=True)
    wrapped(torch.randn(4, 8)).square().mean().backward()
    both.start([p.grad for p in model.parameters()])
    gradients.fused_flags = original
    return [answers, calls]


def test_gradients_in_buckets_of_ddp() -> None:
    for answers, calls in run_ranks(2, ddp_buckets):
        assert answers == [[False, False]] * 3 + [[False, True], [False, False], [True, False]]
        assert calls == [], "the buckets were read, no gradient by itself"
