"""Collectives that one of two ranks answers by itself, over any backend, and what they must give."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as dist_nn

from lightning_lockstep import gather_uneven
from lightning_lockstep.distributed.local_collectives import UnansweredCollectiveError, local_collectives

R = dist.ReduceOp


def four() -> torch.Tensor:
    return torch.arange(4.0)


def reduced(op: Any, tensor: torch.Tensor) -> Any:
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def gathered() -> Any:
    places = [torch.empty(4), torch.empty(4)]
    dist.all_gather(places, four())
    return [place.tolist() for place in places]


def into(call: Callable[..., Any], size: int, *args: Any, **options: Any) -> Any:
    output = torch.full((size,), -1.0)
    call(output, *args, **options)
    return output.tolist()


def asynchronous() -> Any:
    tensor, output = four(), torch.empty(8)
    works = [
        dist.all_reduce(tensor, async_op=True),
        dist.all_gather_into_tensor(output, four(), async_op=True),
        dist.barrier(async_op=True),
    ]
    assert all(work.wait() and work.is_completed() for work in works)
    (value,) = works[0].get_future().wait()
    assert value.data_ptr() == tensor.data_ptr()
    return [tensor.tolist(), output.tolist()]


def objects(rank: int) -> Any:
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, {"rank": rank})
    box = [f"of rank {rank}"]
    dist.broadcast_object_list(box, rank)
    return everyone, box


def from_there(rank: int) -> Any:
    kept = four()
    dist.broadcast(kept, 1 - rank)
    return kept.tolist()


def coalesced() -> Any:
    one, two = torch.ones(1), torch.ones(2)
    with dist._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(two)
    return [one.tolist(), two.tolist()]


def compiled_style() -> Any:
    """Functional collectives, as compiled code calls them."""
    world = dist.group.WORLD
    return [
        functional.all_reduce(four(), "sum", world).tolist(),
        functional.all_gather_tensor(four(), 0, world).tolist(),
        functional.reduce_scatter_tensor(four(), "sum", 0, world).tolist(),
    ]


def with_gradients() -> Any:
    """Gather and sum with gradients; both are answered in the backward too."""
    gradients = []
    gathers = (lambda t: torch.cat(gather_uneven(t)), lambda t: torch.cat(dist_nn.all_gather(t)))
    for call in (*gathers, dist_nn.all_reduce):
        leaf = torch.ones(3, requires_grad=True)
        call(leaf * 1).sum().backward()
        gradients.append(leaf.grad.tolist())
    saved = torch.ones(2, requires_grad=True) * 2
    square = saved * saved
    dist.all_reduce(saved.detach())  # as a backend does, it writes without raising the version
    square.sum().backward()
    return gradients


def refused(rank: int) -> list[str]:
    calls: list[Callable[[], Any]] = [
        lambda: dist.send(four(), 1 - rank),
        lambda: dist.recv(four(), 1 - rank),
        lambda: dist.broadcast_object_list([1], 1 - rank),
        lambda: dist.scatter_object_list([None], None, 1 - rank),
        lambda: dist.gather(four(), None, 1 - rank),
        lambda: dist.reduce(four(), rank),
        lambda: dist.all_reduce(four(), R.PRODUCT),
        lambda: dist.all_gather(uneven(rank), four()),
    ]
    said = []
    for call in calls:
        with pytest.raises(UnansweredCollectiveError, match="in a step that runs on one rank alone") as caught:
            call()
        said.append(str(caught.value).split(" cannot")[0])
    return said


def uneven(rank: int) -> list[torch.Tensor]:
    """Room for this rank's four values, and for three of the other."""
    return [torch.empty(4 if each == rank else 3) for each in (0, 1)]


def answers(rank: int) -> dict[str, Any]:
    """Call everything on this rank alone."""
    with local_collectives() as local:
        found = {
            "reduced": [reduced(op, four()) for op in (R.SUM, R.AVG, R.MIN, R.MAX)],
            "flags": reduced(R.SUM, torch.tensor([True, False])),
            "gathered": gathered(),
            "into": into(dist.all_gather_into_tensor, 8, four()),
            "scattered sums": [
                into(dist.reduce_scatter_tensor, 2, four()),
                into(dist.reduce_scatter, 2, list(four().split(2))),
            ],
            "exchanged": into(dist.all_to_all_single, 4, four()),
            "uneven exchange": into(dist.all_to_all_single, 2, four(), [1, 1], [3, 1] if rank else [1, 3]),
            "asynchronous": asynchronous(),
            "objects": objects(rank),
            "from there": from_there(rank),
            "coalesced": coalesced(),
            "functional": compiled_style(),
            "gradients": with_gradients(),
            "refused": refused(rank),
        }
        dist.barrier()
        assert len(local) > 20
    return found


def expected(rank: int) -> dict[str, Any]:
    own, double = [[0.0, 1.0], [2.0, 3.0]][rank], [[0.0, 2.0], [4.0, 6.0]][rank]
    all_four, twice = four().tolist(), (2 * four()).tolist()
    return {
        "reduced": [twice, all_four, all_four, all_four],
        "flags": [True, False],
        "gathered": [all_four, all_four],
        "into": all_four * 2,
        "scattered sums": [double, double],
        "exchanged": own * 2,
        "uneven exchange": [3.0, 3.0] if rank else [0.0, 0.0],
        "asynchronous": [twice, all_four * 2],
        "objects": ([{"rank": rank}] * 2, [f"of rank {rank}"]),
        "from there": all_four,
        "coalesced": [[2.0], [2.0, 2.0]],
        "functional": [twice, all_four * 2, double],
        "refused": [
            *("send", "recv", "broadcast", "broadcast", "gather", "reduce"),
            *("allreduce", "allgather"),
        ],
    }


def one_alone(rank_alone: int) -> Any:
    """Rank ``rank_alone`` answers for itself while the other waits in an all-reduce that both then make."""
    warnings.simplefilter("ignore")
    found = answers(dist.get_rank()) if dist.get_rank() == rank_alone else None
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    before = torch.tensor([1.0])
    with local_collectives():
        dist.all_reduce(before)
    dist.all_reduce(total)
    return found, total.item(), before.item()


def check(rank: int, found: dict[str, Any]) -> None:
    # Gloo's exchange in torch.distributed.nn is made of scatters, and those of the other rank are zeros.
    ours, theirs, total = found.pop("gradients")
    assert ours == total == [2.0] * 3 and theirs in (ours, [1.0] * 3)
    wanted = json.loads(json.dumps(expected(rank)))
    found = json.loads(json.dumps(found))
    assert found == wanted
