"""Tensors of different shapes, gathered on every rank with their gradients; what does not fit is one error."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep import ConfigurationError, gather_uneven
from tests.harness import run_ranks
from tests.models.distributed.uneven_gathers import CASES, all_cases, mismatches


def cases_and_mismatches() -> tuple[dict[str, list[str]], dict[str, str]]:
    return all_cases(), mismatches()


@pytest.fixture(scope="module")
def seen() -> list[Any]:
    return run_ranks(3, cases_and_mismatches, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_tensors_of_each_and_their_gradients(name: str, seen: list[Any]) -> None:
    assert [wrong[name] for wrong, _ in seen] == [[], [], []]


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("dtype", ["float32", "bfloat16", "Make the dtypes equal"]),
        ("dimensions", ["(2,)", "(3, 1)", "Make the numbers of dimensions equal"]),
        ("one of many", ["gather_uneven at ['b']", "int64", "(3,)", "Make the dtypes equal"]),
        ("keys", ["tensors at ['a']", "tensors at ['b']", "Make the arguments"]),
        ("length", ["1 tensors at [0] ", "20 tensors at [0], [1]", "Make the arguments"]),
        ("container", ["a tensor ", "no tensors"]),
        ("number", ["gather_uneven was given 3: expected a dense tensor"]),
        ("sparse", ["a tensor of torch.sparse_coo on cpu"]),
        ("meta", ["a tensor of torch.strided on meta"]),
    ],
)
def test_what_does_not_fit_is_one_error_on_every_rank(case: str, texts: list[str], seen: list[Any]) -> None:
    (told,) = {errors[case] for _, errors in seen}
    assert told.startswith("CollectiveMismatchError: ranks disagree on a collective of group 'world'")
    assert "uneven_gathers.py:" in told and "<- differs" in told
    assert all(text in told for text in texts), told


def test_what_is_wrong_on_every_rank_is_each_ranks_own_error(seen: list[Any]) -> None:
    assert [errors["all wrong"].partition(": expected")[0] for _, errors in seen] == [
        "ConfigurationError: gather_uneven was given None at [0]",
        *["ConfigurationError: gather_uneven was given 'text'"] * 2,
    ]


def test_one_process_gets_its_own_object() -> None:
    given = {"a": torch.ones(2, requires_grad=True)}
    (entry,) = gather_uneven(given)
    assert entry is given
    with pytest.raises(ConfigurationError, match="was given 3 at \\[1\\]: expected a dense tensor"):
        gather_uneven([torch.ones(2), 3])
    with pytest.raises(ConfigurationError, match="group='world': expected a process group"):
        gather_uneven(torch.ones(2), group="world")  # type: ignore[arg-type]


# -- under DDP -----------------------------------------------------------------------------------------


def objective(parts: list[Tensor]) -> Tensor:
    """A loss that compares every row with every other, as contrastive learning does."""
    rows = torch.cat(parts)
    return (rows @ rows.t()).logsumexp(1).mean()


def loss_of_all_parts() -> bool:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    inputs = [torch.randn(rank + 2, 3) for rank in range(dist.get_world_size())]
    (whole,) = torch.autograd.grad(objective([model(batch) for batch in inputs]), [model.weight])
    wrapped = DistributedDataParallel(model)
    objective(gather_uneven(wrapped(inputs[dist.get_rank()]))).backward()
    assert model.weight.grad is not None
    return torch.allclose(model.weight.grad, whole, atol=1e-6)


class SumOfNothing(torch.nn.Module):
    """Rank 1 has nothing to give and no use for the result; the layers after the gather have their own bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(4, 4)
        layers = (torch.nn.Linear(4, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 1))
        self.after = torch.nn.Sequential(*layers)

    def forward(self, batch: Tensor) -> Tensor:
        found, is_idle = self.before(batch), dist.get_rank() == 1
        everyone = gather_uneven(found[:0] if is_idle else found)
        result = self.after(torch.cat(everyone))
        return found.sum() + result.flatten()[:0].sum() if is_idle else result.sum()


def no_use_for_the_result(find_unused_parameters: bool) -> list[bool]:
    torch.manual_seed(0)
    model, batches = SumOfNothing(), [torch.randn(count, 4) for count in (2, 3)]
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=1, find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True
    )
    equal = []
    for _ in range(3):  # torch makes the buckets anew after the first step
        model.zero_grad()
        wrapped(batches[dist.get_rank()]).backward()
        mean = (model.after(model.before(batches[0])).sum() + model.before(batches[1]).sum()) / 2
        wanted = torch.autograd.grad(mean, list(model.parameters()))
        equal += [
            torch.allclose(parameter.grad, gradient, atol=1e-4)
            for parameter, gradient in zip(model.parameters(), wanted, strict=True)
            if parameter.grad is not None
        ]
    return equal


def unused() -> str:
    """Rank 1 has no use for the result: with a sum of no element it takes part; without, rank 0 waits to its limit."""
    rank = dist.get_rank()
    own = torch.ones(rank + 1, requires_grad=True)
    parts = gather_uneven(own)
    (parts[0].flatten()[:0].sum() if rank else torch.stack([part.sum() for part in parts]).sum()).backward()
    assert own.grad is not None and own.grad.tolist() == [1.0] * (rank + 1)
    parts = gather_uneven(own)
    if rank == 1:
        own.sum().backward()
        dist.distributed_c10d._get_default_store().wait(["rank 0 is done"])
        return "went on"
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    try:
        sum(part.sum() for part in parts).backward()
    except RuntimeError as error:
        dist.distributed_c10d._get_default_store().set("rank 0 is done", "")
        return f"was told: {error}"
    return "never"


def under_ddp() -> tuple[bool, list[list[bool]], str]:
    return loss_of_all_parts(), [no_use_for_the_result(find) for find in (False, True)], unused()


def test_under_ddp() -> None:
    zero, one = run_ranks(2, under_ddp, timeout=60)
    assert zero[0] and one[0], "a loss of all parts has the gradient that one process has"
    # Whether unused parameters are looked for or not: each of 8 in each of 3 steps.
    assert zero[1] == one[1] == [[True] * 24] * 2, "a rank without use for the result uses the same parameters"
    assert zero[2].startswith("was told: ") and "Timed out" in zero[2]
    assert one[2] == "went on"
