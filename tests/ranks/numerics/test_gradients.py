"""The check of many gradients in one pass: views of DDP's buckets, and what that pass does not take."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep.numerics.statistics import any_bad
from tests.helpers import run_ranks

INF, NAN = float("inf"), float("nan")


def bucket(*, count: int = 10, size: int = 6, spare: int = 4) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor and views of it; the last ``spare`` elements belong to no view."""
    flat = torch.randn(count * size + spare, generator=torch.Generator().manual_seed(0))
    return flat, [flat.as_strided((size,), (1,), n * size) for n in range(count)]


def test_what_a_storage_holds_beside_the_tensors_does_not_count() -> None:
    flat, views = bucket(count=20)
    mine, others = views[:12], views[12:]
    others[3][0] = NAN
    flat[-1] = INF
    assert not any_bad(mine)
    assert any_bad(others)
    others[3][0] = 0.0
    assert not any_bad(others)
    mine[0][0] = NAN
    assert any_bad(mine)


def test_large_finite_values_are_no_alarm() -> None:
    _, views = bucket()
    for view in views:
        view.fill_(3e38)
    assert not any_bad(views)


@pytest.mark.parametrize("kind", ["sparse", "two dtypes", "few", "a large storage"])
def test_what_shares_no_few_storages_is_checked_tensor_by_tensor(kind: str) -> None:
    _, views = bucket()
    tensors = {
        "sparse": [*views, torch.eye(3).to_sparse()],
        "two dtypes": [*views, *(view.view(torch.int32).view(torch.float32) for view in views[:1])],
        "few": [torch.randn(3) for _ in range(10)],
        "a large storage": [torch.zeros(1000).as_strided((1,), (1,), n) for n in range(10)],
    }[kind]
    if kind == "two dtypes":
        tensors += [views[0].view(torch.bfloat16)]
    assert not any_bad(tensors)
    tensors[0].view(-1)[0] = NAN
    assert any_bad(tensors)


def ddp_buckets() -> list[Any]:
    """Two optimizers over one DDP model: what each check finds."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    first, second = list(model[:10].parameters()), list(model[10:].parameters())
    answers: list[Any] = []
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
        answers.append([any_bad([p.grad for p in some if p.grad is not None]) for some in (first, second)])
    return answers


def test_gradients_in_buckets_of_ddp() -> None:
    for answers in run_ranks(2, ddp_buckets):
        assert answers == [[False, False]] * 3 + [[False, True], [False, False], [True, False]]
