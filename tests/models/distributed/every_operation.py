"""Every operation of torch.distributed, called by two ranks that agree; each function returns what came of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as dist_nn
import torchmetrics
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep import gather_uneven

#: What gloo of this torch cannot do.
GLOO_LACKS = {"all_to_all"} if torch.__version__ < "2.10" else set[str]()


def own(rank: int) -> torch.Tensor:
    return torch.arange(4.0) + 10 * rank


def to_all(rank: int) -> Any:
    total, sent = own(rank), own(rank)
    places, whole, part = [torch.empty(4), torch.empty(4)], torch.empty(2, 4), torch.empty(2)
    dist.all_reduce(total)
    dist.broadcast(sent, 1)
    dist.all_gather(places, own(rank))
    dist.all_gather_into_tensor(whole.view(-1), own(rank))
    dist.reduce_scatter_tensor(part, own(rank))
    listed = torch.empty(2)
    dist.reduce_scatter(listed, list(own(rank).split(2)))
    dist.barrier()
    if dist.get_backend() == "gloo":
        dist.monitored_barrier()
    return [t.tolist() for t in (total, sent, *places, whole, part, listed)]


def to_one(rank: int) -> Any:
    total, part = own(rank), torch.empty(2)
    places = [torch.empty(4), torch.empty(4)] if rank == 0 else None
    dist.reduce(total, 1)
    dist.gather(own(rank), places, 0)
    dist.scatter(part, list(own(rank).split(2)) if rank == 1 else None, 1)
    return [t.tolist() for t in (total, *(places or []), part) if rank == 1 or t is not total]


def exchanged(rank: int) -> Any:
    halves, rows = list(torch.zeros(4).split(2)), torch.empty(3, 2)
    if not (GLOO_LACKS and dist.get_backend() == "gloo"):
        dist.all_to_all(halves, list(own(rank).split(2)))
    # Rank 0 sends one row to each, rank 1 two to each.
    sent = torch.full(((4, 2) if rank else (2, 2)), float(rank))
    dist.all_to_all_single(rows, sent, [1, 2], [2, 2] if rank else [1, 1])
    return [t.tolist() for t in (*halves, rows)]


def messages(rank: int) -> Any:
    received = [torch.empty(2) for _ in range(3)]
    if rank == 0:
        dist.send(torch.ones(2), 1)
        dist.recv(received[0], 1)
    else:
        dist.recv(received[0])  # from any rank
        dist.send(torch.ones(2) * 2, 0)
    waiting = [
        dist.P2POp(dist.isend, torch.full((2,), 5.0 + rank), 1 - rank),
        dist.P2POp(dist.irecv, received[1], 1 - rank),
    ]
    for work in dist.batch_isend_irecv(waiting):
        work.wait()
    pending = dist.irecv(received[2], 1 - rank)
    dist.isend(torch.full((2,), 7.0 + rank), 1 - rank).wait()
    dist.barrier()  # a collective between a receive and its end
    pending.wait()
    return [t.tolist() for t in received]


def objects(rank: int) -> Any:
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, "x" * (1 + 1000 * rank))
    box, given = [f"of rank {rank}"], [None]
    dist.broadcast_object_list(box, 1)
    collected = [None, None] if rank == 0 else None
    dist.gather_object({"rank": rank}, collected, 0)
    dist.scatter_object_list(given, ["a", ["b"]] if rank == 0 else None, 0)
    return [len(each) for each in everyone], box, collected, given


def many_at_once(rank: int) -> Any:
    one, two = torch.ones(1), torch.ones(2)
    with dist._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(two)
    lists = [[torch.empty(1), torch.empty(2)] for _ in range(2)]
    dist.distributed_c10d.all_gather_coalesced(lists, [one, two])
    works = [dist.all_reduce(one, async_op=True), dist.broadcast(two, 0, async_op=True)]
    for work in works:
        work.wait()
    with torch.inference_mode():
        inside = torch.ones(3)
        dist.all_reduce(inside)
    flags = torch.tensor([True, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [t.tolist() for t in (one, two, *lists[1], inside, flags)]


def compiled_style(rank: int) -> Any:
    world = dist.group.WORLD
    leaf = torch.ones(2, requires_grad=True)
    torch.cat(dist_nn.all_gather(leaf * 1)).sum().backward()
    return [
        functional.all_reduce(own(rank), "sum", world).tolist(),
        functional.all_gather_tensor(own(rank), 0, world).tolist(),
        functional.reduce_scatter_tensor(own(rank), "sum", 0, world).tolist(),
        leaf.grad.tolist(),
    ]


def shapes_that_differ(rank: int) -> Any:
    metric = torchmetrics.CatMetric()
    metric.update(torch.ones(1 + rank))
    return [part.tolist() for part in gather_uneven(torch.ones(1 + 2 * rank))], metric.compute().tolist()


def ddp(rank: int) -> Any:
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(2, 1), bucket_cap_mb=0.000001)
    for _ in range(2):
        model(torch.ones(1, 2) * rank).sum().backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]


PARTS = [to_all, to_one, exchanged, messages, objects, many_at_once, compiled_style, shapes_that_differ, ddp]
