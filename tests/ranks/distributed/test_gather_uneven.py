"""Tensors of different shapes, gathered on every rank with their gradients; what does not fit is one error."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep import CollectiveMismatchError, ConfigurationError, gather_uneven
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.local_collectives import local_collectives
from tests.helpers import kill_self, run_ranks, run_ranks_raw, world_size

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


class Output(NamedTuple):
    logits: Tensor
    extra: Any


def made(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor of a rank, which every rank can make."""
    numbers = torch.arange(int(torch.tensor(shape).prod()) if shape else 1) + 100 * rank + 1
    return numbers.reshape(shape).to(dtype)


# The tensor of each rank, by what is special about it.
KINDS: dict[str, Callable[[int], Tensor]] = {
    "first dimension": lambda rank: made(rank, rank + 1, 3),
    "last dimension": lambda rank: made(rank, 2, 5 - rank),
    "every dimension": lambda rank: made(rank, rank + 1, 4 - rank, 2 * rank + 1),
    "equal": lambda rank: made(rank, 2, 3),
    "empty on one": lambda rank: made(rank, rank, 3),
    "empty on all": lambda rank: made(rank, 0, rank),
    "no dimension": lambda rank: made(rank),
    "transposed": lambda rank: made(rank, 3, rank + 2).t(),
    "strided": lambda rank: made(rank, 4, 6)[::2, rank::2],
    "expanded": lambda rank: made(rank, 1, 3).expand(rank + 2, 3),
    "conjugate": lambda rank: (made(rank, rank + 1, dtype=torch.complex64) * (1 + 2j)).conj(),
    "large": lambda rank: made(rank, 100_000 + rank, dtype=torch.float64),
}


def unlike_values() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for name, make in KINDS.items():
        parts = gather_uneven(make(rank))
        wrong += [
            f"{name}: entry {i}"
            for i in range(size)
            if parts[i].dtype != make(i).dtype or not torch.equal(parts[i], make(i).contiguous())
        ]
    for dtype in DTYPES:
        parts = gather_uneven(made(rank, rank + 1, 2, dtype=dtype))
        if not all(torch.equal(part, made(i, i + 1, 2, dtype=dtype)) for i, part in enumerate(parts)):
            wrong.append(str(dtype))
    return wrong


@world_size(1, 2, 4)
def test_every_rank_gets_the_tensor_of_each(world_size: int) -> None:
    assert run_ranks(world_size, unlike_values) == [[]] * world_size


def unlike_torch() -> tuple[bool, bool]:
    """Compare with torch's all_gather on equal shapes: values, and gradients of a loss that differs by rank."""
    from torch.distributed.nn.functional import all_gather

    results = []
    for gather in (gather_uneven, all_gather):
        own = made(dist.get_rank(), 3, 2).requires_grad_()
        parts = gather(own * 2)  # type: ignore[no-untyped-call]
        loss = sum((part.sin() * (i + 1 + dist.get_rank())).sum() for i, part in enumerate(parts))
        loss.backward()
        results.append((torch.stack(list(parts)).detach(), own.grad))
    (ours, our_gradient), (theirs, their_gradient) = results
    return torch.equal(ours, theirs), torch.allclose(our_gradient, their_gradient, rtol=1e-6)


@world_size(2, 3)
def test_equal_shapes_give_values_and_gradients_of_torch(world_size: int) -> None:
    assert run_ranks(world_size, unlike_torch) == [(True, True)] * world_size


def as_accelerate_gathers() -> bool:
    from accelerate.state import PartialState
    from accelerate.utils import gather, pad_across_processes

    PartialState(cpu=True)
    own = made(dist.get_rank(), 3 - dist.get_rank(), 4)
    padded = gather(pad_across_processes(own)).chunk(dist.get_world_size())
    parts = gather_uneven(own)
    return all(torch.equal(part, long[: len(part)]) for part, long in zip(parts, padded, strict=True))


def test_uneven_shapes_give_what_accelerate_gathers_without_its_padding() -> None:
    assert run_ranks(2, as_accelerate_gathers) == [True, True]


def gradients(dtype: torch.dtype) -> list[bool]:
    """Each rank weighs the part of rank i by another number; its own gradient must be the sum of those weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {
        "uneven": made(rank, rank + 1, 2).to(dtype).requires_grad_(),
        "counts": torch.arange(rank + 1),
        "constant": torch.ones(1),
        "on rank 0 alone": torch.ones(rank, dtype=dtype, requires_grad=rank == 1),
    }
    parts = gather_uneven(own)
    sum((part["uneven"] * (10 * rank + i + 1)).sum().real for i, part in enumerate(parts)).backward()
    expected = sum(10 * other + rank + 1 for other in range(size))
    gradient = own["uneven"].grad
    return [
        gradient is not None and gradient.dtype == dtype,
        bool((gradient == expected).all()),
        all(part["uneven"].requires_grad for part in parts),
        not any(part["counts"].requires_grad or part["constant"].requires_grad for part in parts),
        all(part["on rank 0 alone"].requires_grad for part in parts),
    ]


@world_size(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_each_rank_gets_the_sum_of_the_gradients_of_its_tensor(world_size: int, dtype: torch.dtype) -> None:
    assert run_ranks(world_size, gradients, dtype) == [[True] * 5] * world_size


def gradients_of_one_rank(owner: int) -> tuple[Any, bool]:
    """Only one rank's tensor requires a gradient; each rank uses another entry."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.ones(rank + 1, requires_grad=rank == owner)
    parts = gather_uneven(own)
    used = parts[(rank + 1) % size]
    (used * (rank + 5)).sum().backward()
    return (None if own.grad is None else own.grad.tolist()), used.requires_grad


@pytest.mark.parametrize("owner", [0, 1])
def test_ranks_whose_tensor_needs_no_gradient_take_part_in_backward(owner: int) -> None:
    """Else the owner would wait for them in its backward."""
    weight = 5 + (owner - 1) % 3  # of the one rank that uses its entry
    expected = [([float(weight)] * (owner + 1) if rank == owner else None, True) for rank in range(3)]
    assert run_ranks(3, gradients_of_one_rank, owner) == expected


def objective(parts: list[Tensor]) -> Tensor:
    """A loss that compares every row with every other, as contrastive learning does."""
    rows = torch.cat(parts)
    return (rows @ rows.t()).logsumexp(1).mean()


def under_ddp() -> bool:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    inputs = [torch.randn(rank + 2, 3) for rank in range(dist.get_world_size())]
    (whole,) = torch.autograd.grad(objective([model(batch) for batch in inputs]), [model.weight])
    wrapped = DistributedDataParallel(model)
    objective(gather_uneven(wrapped(inputs[dist.get_rank()]))).backward()
    assert model.weight.grad is not None
    return torch.allclose(model.weight.grad, whole, atol=1e-6)


def test_under_ddp_a_loss_of_all_parts_has_the_gradient_of_one_process() -> None:
    """Every rank computes it: the sum over the ranks is undone by DDP's mean."""
    assert run_ranks(2, under_ddp) == [True, True]


def no_use_for_the_result(find_unused_parameters: bool) -> list[bool]:
    """Rank 1 has nothing to give and no use for the result; the layers after the gather have a bucket of their own."""
    from torch.nn.parallel import DistributedDataParallel

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = torch.nn.Linear(4, 4)
            layers = (torch.nn.Linear(4, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 1))
            self.after = torch.nn.Sequential(*layers)

        def forward(self, batch: Tensor) -> Tensor:
            found = self.before(batch)
            everyone = gather_uneven(found[:0] if rank else found)
            result = self.after(torch.cat(everyone))
            return found.sum() + result.flatten()[:0].sum() if rank else result.sum()

    rank = dist.get_rank()
    torch.manual_seed(0)
    model, batches = Model(), [torch.randn(count, 4) for count in (2, 3)]
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=1, find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True
    )
    alike = []
    for _ in range(3):  # torch makes the buckets anew after the first step
        model.zero_grad()
        wrapped(batches[rank]).backward()
        mean = (model.after(model.before(batches[0])).sum() + model.before(batches[1]).sum()) / 2
        wanted = torch.autograd.grad(mean, list(model.parameters()))
        alike += [
            torch.allclose(parameter.grad, gradient, atol=1e-4)
            for parameter, gradient in zip(model.parameters(), wanted, strict=True)
            if parameter.grad is not None
        ]
    return alike


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_under_ddp_a_rank_without_use_for_the_result_uses_the_same_parameters(
    find_unused_parameters: bool,
) -> None:
    count = 3 * 8
    assert run_ranks(2, no_use_for_the_result, find_unused_parameters, timeout=60) == [[True] * count] * 2


def nested_order() -> list[bool]:
    """Several calls, of which each rank's graph uses the results in another order."""
    rank = dist.get_rank()
    first, second = torch.ones(rank + 1, requires_grad=True), torch.ones(2, rank + 1, requires_grad=True)
    a, b = gather_uneven(first), gather_uneven(second)
    terms = [(a[0] * 2).sum().exp().log(), (b[1] * 3).sum()]
    sum(terms if rank else reversed(terms)).backward()
    return [bool((first.grad == 4 * (rank == 0)).all()), bool((second.grad == 6 * (rank == 1)).all())]


def test_several_calls_are_undone_in_one_order_whatever_each_ranks_graph() -> None:
    assert run_ranks(2, nested_order) == [[True, True], [True, True]]


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


def test_a_loss_that_does_not_use_the_result_needs_a_zero_of_it() -> None:
    told, other = run_ranks(2, unused)
    assert told.startswith("was told: ") and "Timed out" in told
    assert other == "went on"


def nested() -> list[bool]:
    rank = dist.get_rank()
    names = ["b", "a"] if rank else ["a", "b"]
    given = OrderedDict((name, Output(made(rank, rank + 1), (made(rank, 2), [made(rank)]))) for name in names)
    parts = gather_uneven(given)
    return [
        type(part) is OrderedDict
        and list(part) == names
        and all(isinstance(part[name], Output) for name in names)
        and all(torch.equal(part[name].logits, made(i, i + 1)) for name in names)
        and torch.equal(part["a"].extra[1][0], made(i))
        for i, part in enumerate(parts)
    ] + [gather_uneven({}) == [{}, {}], gather_uneven([[], ()]) == [[[], ()]] * 2]


def test_containers_keep_their_types_and_dicts_their_own_order() -> None:
    assert run_ranks(2, nested) == [[True] * 4] * 2


def long_description() -> bool:
    """More tensors than the first exchange has room for, on one rank's account as on the other's."""
    rank = dist.get_rank()
    own = {f"layer.{i}": made(rank, (i + rank) % 5, 2) for i in range(200)}
    parts = gather_uneven(own)
    return all(
        torch.equal(part[f"layer.{i}"], made(r, (i + r) % 5, 2))
        for r, part in enumerate(parts)
        for i in range(200)
    )


def test_many_tensors() -> None:
    assert run_ranks(2, long_description) == [True, True]


def independent() -> list[bool]:
    own = torch.ones(dist.get_rank() + 1)
    first, second = gather_uneven(own)
    first += 1
    with torch.inference_mode():
        inside = gather_uneven(own)
    return [
        own.tolist() == [1.0] * len(own),
        second.tolist() == [1.0, 1.0],
        second.untyped_storage().nbytes() == second.nbytes,
        inside[1].tolist() == [1.0, 1.0],
    ]


def test_entries_are_memory_of_their_own() -> None:
    assert run_ranks(2, independent) == [[True] * 4] * 2


def in_groups() -> list[Any]:
    rank = dist.get_rank()
    pair = dist.new_group([2, 0])
    alone = dist.new_group([1])
    seen: list[Any] = []
    if rank == 1:
        own = made(1, 2)
        seen.append(gather_uneven(own, group=alone)[0] is own)
        with pytest.raises(ConfigurationError, match="expected a process group"):
            gather_uneven(own, group=pair)
    else:
        own = made(rank, rank + 1).requires_grad_()
        parts = gather_uneven(own, group=pair)
        sum(part.sum() for part in parts).backward()
        ranks = dist.get_process_group_ranks(pair)
        seen.append(all(torch.equal(p, made(r, r + 1)) for r, p in zip(ranks, parts, strict=True)))
        seen.append(own.grad is not None and own.grad.tolist() == [2.0] * (rank + 1))
        with pytest.raises(CollectiveMismatchError, match=r"\n  2 +gather_uneven "):
            gather_uneven(made(rank) if rank else made(rank, 1), group=pair)
    return seen


def test_a_group_of_some_ranks() -> None:
    assert run_ranks(3, in_groups) == [[True, True], [True], [True, True]]


def mismatched(case: str) -> str:
    """What a rank is told; afterwards the group must work."""
    first = dist.get_rank() == 0
    given: Any = {
        "dtype": lambda: torch.ones(2, dtype=torch.float32 if first else torch.bfloat16),
        "dimensions": lambda: torch.ones(2) if first else torch.ones(3, 1),
        "one of many": lambda: {
            "a": torch.ones(2),
            "b": made(0, 3, dtype=torch.int64 if first else torch.int32),
        },
        "keys": lambda: {"a": torch.ones(2)} if first else {"b": torch.ones(2)},
        "length": lambda: [torch.ones(2)] * (1 if first else 20),
        "container": lambda: torch.ones(2) if first else [],
        "number": lambda: torch.ones(2) if first else 3,
        "sparse": lambda: torch.ones(2) if first else torch.ones(2).to_sparse(),
        "meta": lambda: torch.ones(2) if first else torch.ones(2, device="meta"),
        "all wrong": lambda: [None] if first else "text",
        "grad mode": lambda: torch.ones(2, requires_grad=True),
    }[case]()
    with torch.set_grad_enabled(first or case != "grad mode"):
        try:
            gather_uneven(given)
        except (CollectiveMismatchError, ConfigurationError) as error:
            text = f"{type(error).__name__}: {error}"
    assert len(gather_uneven(torch.ones(2))) == dist.get_world_size()
    return text


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("dtype", ["float32", "bfloat16", "Make the dtypes equal"]),
        ("dimensions", ["(2,)", "(3, 1)", "Make the numbers of dimensions equal"]),
        ("one of many", ["gather_uneven at ['b']", "int64", "(3,)", "Make the dtypes equal"]),
        ("keys", ["tensors at ['a']", "tensors at ['b']", "Make the arguments"]),
        ("length", ["tensors at [0] ", "[6], [7], ...", "20 x float32", "Make the arguments"]),
        ("container", ["a tensor ", "no tensors"]),
        ("number", ["gather_uneven was given 3: expected a dense tensor"]),
        ("sparse", ["a tensor of torch.sparse_coo on cpu"]),
        ("meta", ["a tensor of torch.strided on meta"]),
        ("grad mode", ["autograd records", "autograd is off"]),
    ],
)
def test_what_does_not_fit_is_one_error_on_every_rank(case: str, texts: list[str]) -> None:
    (told, other) = run_ranks(2, mismatched, case)
    assert told == other
    assert told.startswith("CollectiveMismatchError: ranks disagree on a collective of group 'world'")
    assert "test_gather_uneven.py:" in told and "<- differs" in told
    assert all(text in told for text in texts), told


def test_what_is_wrong_on_every_rank_is_each_ranks_own_error() -> None:
    told = run_ranks(2, mismatched, "all wrong")
    assert [text.partition(": expected")[0] for text in told] == [
        "ConfigurationError: gather_uneven was given None at [0]",
        "ConfigurationError: gather_uneven was given 'text'",
    ]


def test_one_process_gets_its_own_object() -> None:
    given = {"a": torch.ones(2, requires_grad=True)}
    (entry,) = gather_uneven(given)
    assert entry is given
    with pytest.raises(ConfigurationError, match="was given 3 at \\[1\\]: expected a dense tensor"):
        gather_uneven([torch.ones(2), 3])
    with pytest.raises(ConfigurationError, match="group='world': expected a process group"):
        gather_uneven(torch.ones(2), group="world")  # type: ignore[arg-type]


def alone() -> list[Any]:
    """A step that runs on one rank alone, as the replay of a bad batch."""
    dist.barrier()  # rank 0 leaves at once: not before the ranks are connected
    if dist.get_rank() == 0:
        return []
    own = torch.ones(3, requires_grad=True)
    with local_collectives():
        parts = gather_uneven(own)
        sum(part.sum() for part in parts).backward()
    return [[part.tolist() for part in parts], own.grad.tolist()]  # type: ignore[union-attr]


def test_a_step_on_one_rank_alone_gets_copies_of_its_own() -> None:
    assert run_ranks(2, alone) == [[], [[[1.0] * 3] * 2, [2.0] * 3]]


def work(fault: str, rank: int) -> str:
    """Gather for ever, forward and backward; one rank is given a fault at step 3."""
    crash = propagation_on(current_communicator().side_channel)
    crash.grace_period = 6.0
    try:
        for step in range(100_000):
            crash.check()
            own = torch.ones(dist.get_rank() + 1, requires_grad=True)
            parts = gather_uneven(own)
            if step == 3 and dist.get_rank() == rank:
                if fault == "kill":
                    kill_self()
                raise ValueError("boom between forward and backward")
            sum(part.sum() for part in parts).backward()
    except BaseException as error:
        raised = crash.error_to_raise(error)
        if raised is error:
            raise
        raise raised from None
    return "never"


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_rank_that_fails_leaves_nobody_waiting(fault: str) -> None:
    outcomes = run_ranks_raw(3, work, fault, 1, timeout=60)
    assert not any(outcome.killed_by_helper for outcome in outcomes)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.exception is not None and outcome.exception.startswith("RankFailedError: rank 1 of 3")
