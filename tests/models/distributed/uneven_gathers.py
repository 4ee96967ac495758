"""Calls of gather_uneven on ranks that have met, over any backend: each says what was not as it should be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep import CollectiveMismatchError, ConfigurationError, gather_uneven
from lightning_lockstep.distributed.local_collectives import local_collectives

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
    **{str(dtype): lambda rank, dtype=dtype: made(rank, rank + 1, 2, dtype=dtype) for dtype in DTYPES},  # type: ignore[misc]
}


def false_ones(**facts: Any) -> list[str]:
    """Return the names of what does not hold."""
    return [name for name, holds in facts.items() if not holds]


def values() -> list[str]:
    wrong = []
    for name, make in KINDS.items():
        for i, part in enumerate(gather_uneven(make(dist.get_rank()))):
            if part.dtype != make(i).dtype or not torch.equal(part, make(i).contiguous()):
                wrong.append(f"{name}: entry {i}")
    return wrong


def gradients() -> list[str]:
    """Each rank weighs the part of rank i by another number; its own gradient must be the sum of those weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        own = {
            "uneven": made(rank, rank + 1, 2).to(dtype).requires_grad_(),
            "counts": torch.arange(rank + 1),
            "constant": torch.ones(1),
            "on rank 1 alone": torch.ones(rank, dtype=dtype, requires_grad=rank == 1),
        }
        parts = gather_uneven(own)
        sum((part["uneven"] * (10 * rank + i + 1)).sum().real for i, part in enumerate(parts)).backward()
        gradient = own["uneven"].grad
        wrong += false_ones(
            dtype=gradient is not None and gradient.dtype == dtype,
            gradient=bool((gradient == sum(10 * other + rank + 1 for other in range(size))).all()),
            required=all(part["uneven"].requires_grad for part in parts),
            not_required=not any(part["counts"].requires_grad or part["constant"].requires_grad for part in parts),
            required_on_one=all(part["on rank 1 alone"].requires_grad for part in parts),
        )
    return wrong


def gradients_of_one_rank() -> list[str]:
    """Only one rank's tensor requires a gradient; each rank uses another entry, and takes part in backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for owner in (0, 1):
        own = torch.ones(rank + 1, requires_grad=rank == owner)
        used = gather_uneven(own)[(rank + 1) % size]
        (used * (rank + 5)).sum().backward()
        weight = 5.0 + (owner - 1) % size  # of the one rank that uses the owner's entry
        gradient = None if own.grad is None else own.grad.tolist()
        wrong += false_ones(
            gradient=gradient == ([weight] * (owner + 1) if rank == owner else None),
            required=used.requires_grad,
        )
    return wrong


def order_of_backward() -> list[str]:
    """Several calls, of which each rank's graph uses the results in another order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = torch.ones(rank + 1, requires_grad=True), torch.ones(2, rank + 1, requires_grad=True)
    a, b = gather_uneven(first), gather_uneven(second)
    terms = [(a[0] * 2).sum().exp().log(), (b[1] * 3).sum()]
    sum(terms if rank else reversed(terms)).backward()
    return false_ones(
        first=torch.allclose(first.grad, torch.full_like(first, 2 * size * (rank == 0))),
        second=bool((second.grad == 3 * size * (rank == 1)).all()),
    )


def containers() -> list[str]:
    """They keep their types, and dicts their own order on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = ["b", "a"] if rank else ["a", "b"]
    given = OrderedDict((name, Output(made(rank, rank + 1), (made(rank, 2), [made(rank)]))) for name in names)
    wrong = []
    for i, part in enumerate(gather_uneven(given)):
        wrong += false_ones(
            type=type(part) is OrderedDict and list(part) == names,
            named=all(isinstance(part[name], Output) for name in names),
            values=all(torch.equal(part[name].logits, made(i, i + 1)) for name in names),
            inner=torch.equal(part["a"].extra[1][0], made(i)),
        )
    nothing = gather_uneven({}) == [{}] * size and gather_uneven([[], ()]) == [[[], ()]] * size
    return wrong + false_ones(nothing=nothing)


def many_tensors() -> list[str]:
    """More tensors than the first exchange has room for."""
    rank = dist.get_rank()
    parts = gather_uneven({f"layer.{i}": made(rank, (i + rank) % 5, 2) for i in range(200)})
    return [
        f"rank {r}, layer {i}"
        for r, part in enumerate(parts)
        for i in range(200)
        if not torch.equal(part[f"layer.{i}"], made(r, (i + r) % 5, 2))
    ]


def memory_of_their_own() -> list[str]:
    own = torch.ones(dist.get_rank() + 1)
    first, second, *_ = gather_uneven(own)
    first += 1
    with torch.inference_mode():
        inside = gather_uneven(own)
    return false_ones(
        given=own.tolist() == [1.0] * len(own),
        other=second.tolist() == [1.0, 1.0],
        storage=second.untyped_storage().nbytes() == second.nbytes,
        inference=inside[1].tolist() == [1.0, 1.0],
    )


def in_groups() -> list[str]:
    """A group of two ranks, in which a third has nothing to ask, and one of a single rank."""
    rank = dist.get_rank()
    pair, alone = dist.new_group([2, 0]), dist.new_group([1])
    if rank not in (0, 2):
        own = made(1, 2)
        same = rank != 1 or gather_uneven(own, group=alone)[0] is own
        with pytest.raises(ConfigurationError, match="expected a process group"):
            gather_uneven(own, group=pair)
        return false_ones(alone=same)
    own = made(rank, rank + 1).requires_grad_()
    parts = gather_uneven(own, group=pair)
    sum(part.sum() for part in parts).backward()
    ranks = dist.get_process_group_ranks(pair)
    with pytest.raises(CollectiveMismatchError, match=r"\n  2 +gather_uneven "):
        gather_uneven(made(rank) if rank else made(rank, 1), group=pair)
    return false_ones(
        values=all(torch.equal(p, made(r, r + 1)) for r, p in zip(ranks, parts, strict=True)),
        gradients=own.grad is not None and own.grad.tolist() == [2.0] * (rank + 1),
    )


def on_one_rank_alone() -> list[str]:
    """A step that runs on one rank alone, as the replay of a bad batch, gets copies of its own tensor."""
    size, own = dist.get_world_size(), torch.ones(3, requires_grad=True)
    if dist.get_rank() != 1:
        return []
    with local_collectives():
        parts = gather_uneven(own)
        sum(part.sum() for part in parts).backward()
    return false_ones(
        parts=[part.tolist() for part in parts] == [[1.0] * 3] * size,
        gradient=own.grad is not None and own.grad.tolist() == [float(size)] * 3,
    )


#: What rank 0 gives, and the others.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dtype": (lambda: torch.ones(2), lambda: torch.ones(2, dtype=torch.bfloat16)),
    "dimensions": (lambda: torch.ones(2), lambda: torch.ones(3, 1)),
    "one of many": (
        lambda: {"a": torch.ones(2), "b": made(0, 3, dtype=torch.int64)},
        lambda: {"a": torch.ones(2), "b": made(0, 3, dtype=torch.int32)},
    ),
    "keys": (lambda: {"a": torch.ones(2)}, lambda: {"b": torch.ones(2)}),
    "length": (lambda: [torch.ones(2)], lambda: [torch.ones(2)] * 20),
    "container": (lambda: torch.ones(2), list),
    "number": (lambda: torch.ones(2), lambda: 3),
    "sparse": (lambda: torch.ones(2), lambda: torch.ones(2).to_sparse()),
    "meta": (lambda: torch.ones(2), lambda: torch.ones(2, device="meta")),
    "all wrong": (lambda: [None], lambda: "text"),
}


def mismatches() -> dict[str, str]:
    """What a rank is told of each; afterwards the group must work."""
    told, is_first = {}, dist.get_rank() == 0
    for name, (of_first, of_others) in MISMATCHES.items():
        try:
            gather_uneven((of_first if is_first else of_others)())
            told[name] = "no error"
        except (CollectiveMismatchError, ConfigurationError) as error:
            told[name] = f"{type(error).__name__}: {error}"
        assert len(gather_uneven(torch.ones(2))) == dist.get_world_size()
    return told


#: Each leaves the group as it was.
CASES: dict[str, Callable[[], list[str]]] = {
    "values": values,
    "gradients": gradients,
    "gradients of one rank": gradients_of_one_rank,
    "order of backward": order_of_backward,
    "containers": containers,
    "many tensors": many_tensors,
    "memory of their own": memory_of_their_own,
    "groups": in_groups,
    "on one rank alone": on_one_rank_alone,
}


def all_cases() -> dict[str, list[str]]:
    """Run them one after the other."""
    few = dist.get_world_size() < 3
    return {name: case() for name, case in CASES.items() if not (few and name == "groups")}
