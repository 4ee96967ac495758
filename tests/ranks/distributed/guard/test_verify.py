"""Ranks that call different collectives under guard="verify": the same error on each, and the group goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.guard.verify import CallVerifier, verify_parameters
from lightning_lockstep.errors import CollectiveMismatchError
from tests.harness import run_ranks

Case = Callable[[int], Any]
EQUAL_CALLS = "Call the same collectives with the same arguments in the same order on every rank."


def empty(*shape: int) -> list[Tensor]:
    return [torch.empty(shape) for _ in range(dist.get_world_size())]


def gather_of_other_shapes(rank: int) -> None:
    shape = (1, 2, 5) if rank else (1, 5)
    dist.all_gather(empty(*shape), torch.ones(shape))


def skipped(rank: int) -> None:
    """Rank 1 is one operation ahead."""
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    dist.barrier()


def other_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.bfloat16 if rank else torch.float32))


def other_reduction(rank: int) -> None:
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


def other_source(rank: int) -> None:
    dist.broadcast(torch.ones(3), src=rank)


def one_of_many(rank: int) -> None:
    with dist._coalescing_manager():
        for i in range(12):
            dist.all_reduce(torch.ones(3 if rank and i == 10 else 2))


def asynchronous(rank: int) -> None:
    dist.all_reduce(torch.ones(2 + rank), async_op=True).wait()


class Half(torch.nn.Module):
    """Uses its second layer on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

    def forward(self, batch: Tensor, rank: int) -> Tensor:
        found: Tensor = self.one(batch)
        return found.sum() if rank else self.two(found).sum()


def unused_parameters(rank: int) -> None:
    """Rank 1 never reduces its gradients, and reports its loss while rank 0 waits in backward."""
    model = DistributedDataParallel(Half())
    loss = model(torch.ones(1, 2), rank)
    loss.backward()
    dist.all_reduce(loss.detach())


def other_buckets(rank: int, group: Any = None) -> None:
    """Rank 0 has a bucket for each parameter, rank 1 one for all."""
    # Where no parameter can be unused, the first backward has one bucket, and later ones those of rank 0.
    options = {"find_unused_parameters": True, "bucket_cap_mb": 25 if rank else 0.000001}
    model = DistributedDataParallel(Half(), process_group=group, gradient_as_bucket_view=True, **options)
    model(torch.ones(1, 2), 0).backward()


CASES: dict[str, tuple[Case, list[list[str]], str]] = {
    "shapes": (
        gather_of_other_shapes,
        [["all_gather", "float32", "(1, 5)"], ["all_gather", "float32", "(1, 2, 5)"]],
        "Make the shapes equal on all ranks before the call, or use lightning_lockstep.gather_uneven().",
    ),
    "skipped": (
        skipped,
        [["all_reduce(sum)", "float32", "(3,)"], ["barrier"]],
        EQUAL_CALLS,
    ),
    "dtype": (
        other_dtype,
        [["all_reduce(sum)", "float32", "(3,)"], ["all_reduce(sum)", "bfloat16", "(3,)"]],
        "Make the dtypes equal on all ranks before the call.",
    ),
    "reduction": (
        other_reduction,
        [["all_reduce(sum)", "float32", "(3,)"], ["all_reduce(max)", "float32", "(3,)"]],
        EQUAL_CALLS,
    ),
    "source": (
        other_source,
        [["broadcast from 0", "float32", "(3,)"], ["broadcast from 1", "float32", "(3,)"]],
        EQUAL_CALLS,
    ),
    "one of many": (
        one_of_many,
        [
            ["all_reduce_coalesced(sum)", "float32", "12 x (2,)"],
            ["all_reduce_coalesced(sum)", "float32", "11 x (2,), (3,)"],
        ],
        "Make the shapes equal on all ranks before the call.",
    ),
    "asynchronous": (
        asynchronous,
        [["all_reduce(sum)", "float32", "(2,)"], ["all_reduce(sum)", "float32", "(3,)"]],
        "Make the shapes equal on all ranks before the call.",
    ),
    "unused parameters": (
        unused_parameters,
        [["all_reduce(sum)", "float32", "(9,)"], ["all_reduce(sum)", "float32", "()"]],
        EQUAL_CALLS,
    ),
    "buckets": (
        other_buckets,
        [["all_reduce(sum)", "float32", "(1,)"], ["all_reduce(sum)", "float32", "(9,)"]],
        "DDP averages gradients in backward, but the ranks have brought different ones: ... the same bucket_cap_mb.",
    ),
}


def caught(case: Case, rank: int) -> str:
    try:
        case(rank)
    except CollectiveMismatchError as error:
        return str(error)
    return "no error"


def all_cases() -> dict[str, tuple[str, float]]:
    """The error of each, and what an all-reduce gives after it."""
    verifier, rank, found = CallVerifier(), dist.get_rank(), {}
    verifier.start()
    for name, (case, _, _) in CASES.items():
        message, total = caught(case, rank), torch.ones(1)
        dist.all_reduce(total)
        found[name] = message, total.item()
    assert verifier.outstanding() == []
    verifier.stop()
    return found


def on_two_ranks() -> tuple[dict[str, tuple[str, float]], tuple[str, str]]:
    return all_cases(), parameters_in_another_order()


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return run_ranks(2, on_two_ranks, timeout=120)


@pytest.fixture
def found(two: list[Any]) -> list[dict[str, tuple[str, float]]]:
    return [one[0] for one in two]


@pytest.mark.parametrize("name", list(CASES))
def test_every_rank_raises_the_same_error_and_the_group_goes_on(
    name: str, found: list[dict[str, tuple[str, float]]]
) -> None:
    (message, total), other = found[0][name], found[1][name]
    assert other == (message, total) and total == 2.0
    _, expected, remedy = CASES[name]
    lines = message.splitlines()
    assert re.fullmatch(r"ranks disagree on collective #\d+ of group 'world'", lines[0])
    assert re.split(r"  +", lines[2].strip()) == ["rank", "operation", "dtype", "shape", "called from"]
    file = re.escape(Path(__file__).name)
    for rank, cells in enumerate(expected):
        row = re.split(r"  +", lines[3 + rank].strip())
        assert row[: 1 + len(cells)] == [str(rank), *cells]
        assert re.fullmatch(rf"{file}:\d+ in \w+|backward", row[1 + len(cells)])
        assert row[2 + len(cells) :] == (["<- differs"] if rank else [])
    assert re.match(re.escape(remedy).replace(re.escape("..."), ".*"), lines[-1]), lines[-1]


def sub_groups() -> Any:
    """Four ranks: 1 and 3 disagree in their group while 0 and 2 agree in theirs."""
    verifier, rank = CallVerifier(), dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    verifier.start()
    own, total = groups[rank % 2], torch.ones(1)
    dist.all_reduce(torch.ones(1), group=own)
    message = caught(lambda _: dist.broadcast(torch.ones(4 if rank == 3 else 2), rank % 2, group=own), rank)
    root = caught(lambda _: dist.reduce(torch.ones(2), 3 if rank == 3 else rank % 2, group=own), rank)
    dist.all_reduce(total)
    dist.all_reduce(total, group=own)
    counted = {(call.call.group, call.call.number) for call in verifier.calls()}
    verifier.stop()
    return message, root, total.item(), sorted(counted)


def test_a_sub_group_is_compared_by_itself() -> None:
    four = run_ranks(4, sub_groups, timeout=90)
    assert [each[2] for each in four] == [8.0] * 4
    assert four[0][:2] == four[2][:2] == ("no error", "no error")
    assert four[1] == four[3]
    title, _, _, first, second, _, remedy = four[1][0].splitlines()
    assert re.fullmatch(r"ranks disagree on collective #2 of group '\S+ \(ranks 1, 3\)'", title)
    assert re.match(r"  1     broadcast from 1  float32  \(2,\)", first)
    assert re.match(r"  3     broadcast from 1  float32  \(4,\).*<- differs", second)
    assert remedy == "Make the shapes equal on all ranks before the call."
    assert "  1     reduce(sum) to 1" in four[1][1] and "  3     reduce(sum) to 3" in four[1][1]
    assert sorted(number for _, number in four[1][3]) == [1, 4], "the last call of each group"


def parameters_in_another_order() -> tuple[str, str]:
    """What is said where rank 1 has two layers of one shape in another order, and where it has frozen one."""
    communicator, found = current_communicator(), []
    order = ["one", "two"] if communicator.rank == 0 else ["two", "one"]
    other = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in order})
    same = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("one", "two")})
    verify_parameters(same, communicator.gather)
    same.requires_grad_(communicator.rank == 0)
    for model in (other, same):
        with pytest.raises(CollectiveMismatchError) as raised:
            verify_parameters(model, communicator.gather)
        found.append(str(raised.value))
    return found[0], found[1]


def test_parameters_of_the_same_shapes_in_another_order_are_named_before_ddp_reduces_them(
    two: list[Any],
) -> None:
    (_, found), (_, other) = two
    assert found == other
    rows = [re.split(r"  +", line.strip()) for line in found[0].splitlines()[2:]]
    assert ["0", "rank 0", "one.weight (2, 2) float32 trained"] in rows
    assert ["0", "rank 1", "two.weight (2, 2) float32 trained"] in rows
    assert "rank 1  one.weight (2, 2) float32 frozen" in re.sub("  +", "  ", found[1])
