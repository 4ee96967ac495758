"""Ranks that agree under guard="verify": every operation runs as without it, and nothing is left behind."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as dist_nn
import torchmetrics
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep import gather_uneven
from lightning_lockstep.distributed.c10d_operators import OPERATIONS
from lightning_lockstep.distributed.guard.call_description import POINT_TO_POINT, DispatchedCall, Hook
from lightning_lockstep.distributed.guard.verify import CallVerifier
from lightning_lockstep.distributed.local_collectives import local_collectives
from tests.helpers import run_ranks, run_ranks_raw

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


def alone(rank: int) -> Any:
    """Rank 1 makes a step that the others take no part in."""
    found = torch.ones(1)
    if rank == 1:
        with local_collectives():
            dist.all_reduce(found)
            dist.all_gather([torch.empty(7), torch.empty(7)], torch.ones(7))
    dist.all_reduce(found)
    return found.tolist()


PARTS = [to_all, to_one, exchanged, messages, objects, many_at_once, compiled_style, shapes_that_differ, ddp]


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def kernels() -> list[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in OPERATIONS if has(f"c10d::{name}", "BackendSelect")]


def every_operation() -> Any:
    """Everything without the verifier and with it."""
    rank = dist.get_rank()
    plain = [part(rank) for part in PARTS]
    verifier = CallVerifier(history=1000)
    before = threads_of_this_process()
    verifier.start()
    verifier.start()  # harmless
    found = [part(rank) for part in PARTS]
    with_alone = alone(rank)
    calls = [call for call in verifier.calls() if call.call.number]
    numbers = [call.call.number for call in calls]
    assert numbers == list(range(1, len(calls) + 1))
    assert verifier.outstanding() == [] and all(call.done for call in verifier.calls())
    messages_seen = [call.call.title for call in verifier.calls() if not call.call.number]
    put = kernels()
    verifier.stop()
    verifier.stop()
    left = threads_of_this_process() - before, kernels()
    dist.barrier()
    for _ in range(3):  # over the same store, with the same names
        verifier.start()
        dist.barrier()
        verifier.stop()
    return plain == found, with_alone, {call.call.operation for call in calls}, messages_seen, put, left


def test_every_operation_runs_as_without() -> None:
    for rank, (same, with_alone, operations, messages_seen, put, left) in enumerate(
        run_ranks(2, every_operation, timeout=120)
    ):
        assert same and with_alone == [3.0]
        uncompared = {"send", "recv", "monitored_barrier"}
        assert operations == set(OPERATIONS.values()) - uncompared - GLOO_LACKS
        sent, received = f"send to {1 - rank}", f"recv from {1 - rank}"
        first = [received, sent] if rank == 0 else ["recv", sent]
        assert messages_seen[0] == "monitored_barrier"
        assert sorted(messages_seen[1:]) == sorted([*first, sent, received, sent, received])
        assert put == list(OPERATIONS)
        assert left == (0, [])


def two_threads() -> Any:
    """A group each, in other orders on each rank."""
    verifier, totals = CallVerifier(), {}
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    verifier.start()

    def work(index: int) -> None:
        total = torch.ones(1)
        for _ in range(40):
            dist.all_reduce(total, dist.ReduceOp.MAX, group=groups[index])
            dist.all_gather([torch.empty(1 + index)] * 2, torch.ones(1 + index), group=groups[index])
        totals[index] = total.item()

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads if dist.get_rank() else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    last = {call.call.group: call.call.number for call in verifier.calls()}
    verifier.stop()
    return totals, sorted(last.values())


def test_threads_with_groups_of_their_own() -> None:
    assert run_ranks(2, two_threads, timeout=60) == [({0: 1.0, 1: 1.0}, [80, 80])] * 2


class Foreign(dist.ProcessGroup):
    """A process group that is written in Python, which torch calls past its dispatcher."""

    def __init__(self, rank: int, size: int, *, compares: bool) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name, self.compares_calls = rank, size, "", compares

    def getBackendName(self) -> str:
        return "foreign"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name


def unseen() -> None:
    for name, compares in (("foreign", False), ("comparing", True)):

        def made(store: Any, rank: int, size: int, timeout: Any, compares: bool = compares) -> Foreign:
            return Foreign(rank, size, compares=compares)

        dist.Backend.register_backend(name, made, devices=["cpu"])
        dist.new_group([0, 1], backend=name)
    verifier = CallVerifier()
    verifier.start()
    dist.barrier(dist.group.WORLD)
    verifier.stop()
    verifier.start()
    verifier.stop()


def test_what_is_not_seen_is_said_once() -> None:
    zero, one = run_ranks_raw(2, unseen, timeout=60)
    assert zero.ok and one.ok, zero.traceback
    said = [line for line in (zero.stderr + one.stderr).splitlines() if "lightning-lockstep" in line]
    assert len(said) == 1 and said[0].startswith(
        "lightning-lockstep: guard='verify' does not compare the collectives of process group "
    )
    assert said[0].endswith("(ranks 0, 1)': its class Foreign is written in Python")


def hooked() -> Any:
    """Two hooks, of which one sees messages alone."""
    rank, every, some = dist.get_rank(), [], []

    def note(call: DispatchedCall) -> Any:
        every.append([call.operation, call.group is dist.group.WORLD, call.reduce_op, call.group_root])
        return lambda work: every.append(work is not None)

    def note_messages(call: DispatchedCall) -> None:
        some.append((call.operation, call.group_peer, [list(t.shape) for t in call.flat_tensors()]))

    def refuse(call: DispatchedCall) -> None:
        raise RuntimeError("refused")

    hooks = [Hook(note), Hook(note_messages, operators=POINT_TO_POINT)]
    dist.reduce(torch.ones(2), 1, dist.ReduceOp.PRODUCT)
    with local_collectives():
        dist.all_reduce(torch.ones(1))
    refusing = Hook(refuse, operators=["barrier"])
    with pytest.raises(RuntimeError, match="refused"):
        dist.barrier()
    refusing.remove()
    hooks[0].remove()
    dist.barrier()
    dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.empty(2), 0)
    hooks[1].remove()
    hooks[1].remove()  # harmless
    return every, some, kernels()


def test_hooks_see_what_they_are_for() -> None:
    for rank, found in enumerate(run_ranks(2, hooked, timeout=60)):
        reduced = [["reduce", True, "product", 1], True]
        assert found == (
            [*reduced, ["barrier", True, None, None], False],
            [("recv", 0, [[2]]) if rank else ("send", 1, [[2]])],
            [],
        )
