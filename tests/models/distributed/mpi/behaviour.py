"""What torch.distributed promises of a backend, asked of mpi4py on two ranks, and what must come of it."""

import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep.distributed.guard import collective_call
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.models.distributed import local_calls
from tests.models.distributed.every_operation import PARTS
from tests.models.distributed.mpi.launch import meet


def caught(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def future(rank, size):
    t = torch.full((3,), float(rank))
    work = dist.all_reduce(t, async_op=True)
    doubled = work.get_future().then(lambda f: f.value()[0] * 2)
    work.wait()
    return [doubled.wait().tolist(), work.is_completed(), work.is_success(), t.tolist()]


def callbacks(rank, size):
    """Callbacks wait: for another operation, deeply, for one under way, by blocking; and one raises."""

    def started():
        return dist.all_reduce(torch.ones(300_000), async_op=True).get_future()

    def blocks(_):
        t = torch.ones(2)
        dist.all_reduce(t)
        return t[0].item()

    def nested(depth):
        after = started().then(lambda _: nested(depth - 1) if depth else 0.0)
        return after.wait() + 1

    first, second = started(), started()
    found = [
        nested(4),
        first.then(lambda _: second.wait()[0][-1].item()).wait(),
        started().then(blocks).wait(),
    ]
    found.append(caught(started().then(lambda _: 1 // 0).wait)[0])
    places = [torch.zeros(1) for _ in range(size)]
    gathered = dist.all_gather(places, torch.ones(1), async_op=True).get_future().wait()
    return [*found, blocks(None), [place.item() for place in gathered]]


def overlap(rank, size):
    """Ten reductions are under way at once and end in order."""
    tensors = [torch.full((50_000,), float(rank + i)) for i in range(10)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in reversed(works):
        work.wait()
    return [t[0].item() for t in tensors]


def messages(rank, size):
    if rank == 0:
        dist.send(torch.tensor([1.0, 2.0]), 1, tag=5)
        dist.send(torch.tensor([3.0]), 1, tag=6)
        big = dist.isend(torch.arange(300_000), 1)
        back = torch.zeros(4)
        source = dist.recv(back)
        big.wait()
        return [source, back.tolist()]
    if rank == 1:
        second, first = torch.zeros(1), torch.zeros(2)
        dist.recv(second, 0, tag=6)
        dist.recv(first, 0, tag=5)
        big = torch.zeros(300_000, dtype=torch.int64)
        dist.recv(big, 0)
        dist.send(torch.ones(4), 0)
        return [first.tolist(), second.tolist(), big.sum().item()]
    return None


def wrong_message(rank, size):
    """Another dtype of one size is not seen; less or more than there is room for is."""
    if rank == 0:
        for sent in (torch.ones(3), torch.ones(1), torch.ones(5), torch.ones(3)):
            dist.send(sent, 1)
    if rank == 1:
        errors = [caught(dist.recv, torch.zeros(3, dtype=torch.int32), 0)]
        errors += [caught(dist.recv, torch.zeros(3), 0) for _ in range(2)]
        again = torch.zeros(3)
        dist.recv(again, 0)
        return [*errors, again.tolist()]
    return None


def wrong_calls(rank, size):
    """Other shapes, dtypes and operations."""
    t = torch.ones(4)
    errors = [
        caught(dist.all_reduce, torch.ones(2 + (rank == 1))),
        caught(dist.all_reduce, t.double() if rank else t),
        caught(dist.broadcast, t, 0) if rank else caught(dist.all_reduce, t),
    ]
    after = torch.ones(2)
    dist.all_reduce(after)
    return [errors, after.tolist()]


def wrong_everywhere(rank, size):
    return [
        caught(dist.all_reduce, torch.ones(2, device="meta")),
        caught(dist.all_reduce, torch.ones(2).to_sparse()),
        caught(dist.broadcast, torch.ones(2).to_sparse(), 0),
        caught(dist.all_gather, [torch.zeros(2)], torch.ones(2)),
        caught(dist.all_reduce, torch.ones(2), dist.ReduceOp.BAND),
        caught(dist.reduce_scatter_tensor, torch.zeros(2), torch.zeros(5)),
        caught(dist.group.WORLD.allreduce, [torch.ones(1), torch.ones(1)]),
        caught(dist.all_to_all_single, torch.zeros(size), torch.zeros(size), [1] * size, [2] * size),
    ]


def wrong_splits(rank, size):
    """Rank 1 is sent more than it expects: it alone is told, and the group is not used any more."""
    group = dist.new_group()
    sizes = [1] * (size - 1) + [1 + (rank == 0)]
    given = torch.zeros(sum(sizes))
    return caught(dist.all_to_all_single, torch.zeros(size), given, [1] * size, sizes, group=group)


def error_in_backward(rank, size):
    """A failing reduction reaches the caller of backward as an error, not as a hang."""
    group = dist.new_group(timeout=timedelta(seconds=0.6))
    wrapped = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    if rank == 1:
        time.sleep(1.2)
        return None
    return caught(lambda: wrapped(torch.ones(1, 4)).sum().backward())


def many_groups(rank, size):
    """Groups can be made and destroyed again and again."""
    for _ in range(20):
        group = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(torch.ones(2), group=group)
            dist.destroy_process_group(group)
    return True


def crosswise(rank, size):
    """Large operations of two groups are under way in opposite order on two ranks, again and again."""
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank > 1:
        return None
    found = set()
    for _ in range(60):
        x, y = torch.full((100_000,), 1.0), torch.full((100_000,), 2.0)
        order = [(a, x), (b, y)] if rank == 0 else [(b, y), (a, x)]
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
            for work in [dist.all_reduce(t, op, g, async_op=True) for g, t in order]:
                work.wait()
        found.add((x[0].item(), y[-1].item()))
    return sorted(found)


def large_of_every_number(rank, size):
    """Large sums of whole numbers of every kind, also of those that torch itself cannot add."""
    kinds = [
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    ]
    found = []
    for kind in kinds:
        t = torch.tensor([3 * rank + 1], dtype=kind).repeat(100_001)
        dist.all_reduce(t)
        found.append(sorted(set(t.tolist())))
    return found


def too_late(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=0.6))
    if rank == 1:
        time.sleep(1.2)
        return None
    began = time.monotonic()
    first = caught(dist.all_reduce, torch.ones(2), group=group)
    seconds = time.monotonic() - began
    return [first, seconds, caught(dist.all_reduce, torch.ones(2), group=group)]


def queued(rank, size):
    """Each of three operations is given 1 s, and the other rank comes to one after the other within 0.7 s."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for _ in range(3)]
        return [caught(work.wait) for work in works]
    for _ in range(3):
        time.sleep(0.7)
        dist.all_reduce(torch.ones(2), group=group)
    return []


def late_after_a_mismatch(rank, size):
    """One rank is held up between a comparison and its own part of the report."""
    group, other = dist.new_group(timeout=timedelta(seconds=0.6)), dist.new_group()
    place = collective_call.own_place
    if rank == 1:
        collective_call.own_place = lambda: time.sleep(1.5) or place()
    work = dist.all_reduce(torch.ones(2 + rank), group=group, async_op=True)
    began = time.monotonic()
    found = [caught(work.wait), time.monotonic() - began]
    collective_call.own_place = place
    dist.all_reduce(torch.ones(2), group=other)
    return found


def inference(rank, size):
    """Large tensors that were made in inference mode, as in a validation, are written by the worker."""
    with torch.inference_mode():
        places = [torch.empty(200_000) for _ in range(size)]
        dist.all_gather(places, torch.full((200_000,), float(rank)))
        return [place[-1].item() for place in places]


def local(rank, size):
    """Rank 1 answers the collectives of this backend by itself."""
    attributes = set(vars(dist.group.WORLD))
    seen, *sums = local_calls.one_alone(1)
    return [seen, sums, set(vars(dist.group.WORLD)) == attributes]


def guarded(rank, size, guard):
    """Each operation without the guard and with it: the results, what it has seen, and what it still waits for."""
    plain = [part(rank) for part in PARTS]
    supervisor = RankSupervisor(SupervisorSettings(guard=guard, stall_timeout=20.0))
    supervisor.ranks_have_met(60.0, prints_report=rank == 0)
    under_guard = supervisor.run(lambda: [part(rank) for part in PARTS])
    state = supervisor.propagation.guard.rank.state()
    operations = sorted({one.call.operation for one in state.calls if one.call.number})
    dist.barrier()
    supervisor.propagation.guard.stop()
    return [plain, under_guard == plain, operations, [list(one) for one in state.outstanding]]


def end_in_a_callback(rank, folder):
    """Leave a callback under way at the end of the program."""

    def late(future):
        time.sleep(1)
        Path(folder, f"callback-{rank}").write_text(str(future.value()[0].item()))

    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(late)
    work.wait()


def behaviour(folder, thread_level="multiple", guard="verify", destroys=False):
    """Ask for all of it, on this rank."""
    import mpi4py

    warnings.simplefilter("ignore")
    mpi4py.rc.thread_level = thread_level
    rank, size = meet(seconds=30)
    from mpi4py import MPI

    seen = {"thread level": MPI.Query_thread(), "name": dist.get_backend()}
    for function, more in (*((one, ()) for one in BEHAVIOUR), (guarded, (guard,))):
        try:
            seen[function.__name__] = function(rank, size, *more)
        except Exception:
            seen[function.__name__] = {"error": traceback.format_exc()}
        dist.barrier()
    end_in_a_callback(rank, folder)
    if destroys:
        dist.destroy_process_group()
    return seen


#: A condition on what rank 0, rank 1, ... saw.
Holds = Callable[..., bool]
Error = list[str]  # its class and its text


def broken(promises: dict[str, Holds], found: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return what does not hold, with what each rank saw of it."""
    seen = {name: [one[name] for one in found] for name in promises}
    return {name: seen[name] for name, holds in promises.items() if not _holds(holds, seen[name])}


def _holds(holds: Holds, seen: list[Any]) -> bool:
    try:
        return holds(*seen)
    except (TypeError, LookupError, ValueError):  # a rank had an error where there should be an answer
        return False


def all_are(wanted: Any) -> Holds:
    return lambda *seen: all(one == wanted for one in seen)


def is_error(error: Error, kind: str, *texts: str) -> bool:
    return error[0] == kind and all(text in error[1] for text in texts)


def refused(errors: list[Error], kind: str, texts: list[str]) -> bool:
    return len(errors) == len(texts) and all(map(lambda e, text: is_error(e, kind, text), errors, texts))


def keeps_its_answers(zero: Any, one: Any) -> bool:
    local_calls.check(1, one[0])
    return all(each[1:] == [[6.0, 2.0], True] for each in (zero, one))


WRONG_EVERYWHERE = [
    "device meta",
    "to_dense",
    "to_dense",
    "list of 1 tensors",
    "cannot be reduced",
    "must hold 2 parts",
    "2 were given",
    "split sizes",
]

#: What is asked, and what must come of it on two ranks.
BEHAVIOUR: dict[Callable[..., Any], Holds] = {
    future: all_are([[2.0] * 3, True, True, [1.0] * 3]),
    callbacks: all_are([5.0, 2.0, 2.0, "RuntimeError", 2.0, [1.0, 1.0]]),
    overlap: all_are([1.0 + 2 * i for i in range(10)]),
    crosswise: all_are([(2.0, 4.0)]),
    many_groups: all_are(True),
    messages: lambda zero, one: zero == [1, [1.0] * 4] and one == [[1.0, 2.0], [3.0], sum(range(300_000))],
    wrong_message: lambda zero, one: (
        one[0] is None  # as many bytes, of another dtype
        and is_error(one[1], "CollectiveMismatchError", "4 bytes came from rank 0 of the group, but 12 were")
        and is_error(one[2], "DistBackendError", "receive from 0 of group 'world'", "has sent more")
        and one[3] == [1.0] * 3
    ),
    wrong_splits: lambda zero, one: is_error(
        one, "DistBackendError", "all_to_all_single #1 of group", "make the sizes at both ends equal"
    ),
    wrong_calls: lambda zero, one: (
        zero == one
        and all(is_error(error, "CollectiveMismatchError", "<- differs", "behaviour.py") for error in zero[0])
        and is_error(zero[0][0], "CollectiveMismatchError", "ranks disagree on collective #", "(2,)", "(3,)")
        and zero[1] == [2.0, 2.0]  # afterwards the group goes on
    ),
    wrong_everywhere: lambda *seen: all(refused(one, "ValueError", WRONG_EVERYWHERE) for one in seen),
    large_of_every_number: all_are([[5]] * 8),
    inference: all_are([0.0, 1.0]),
    local: keeps_its_answers,
    too_late: lambda zero, one: (
        is_error(zero[0], "CollectiveStallError", "all_reduce(sum) #1 of group", "timed out after 0.6 s")
        and zero[1] < 30
        and is_error(zero[2], "DistBackendError", "cannot be used any more")
    ),
    queued: lambda zero, one: zero == [None] * 3,
    late_after_a_mismatch: lambda zero, one: (
        is_error(zero[0], "CollectiveStallError", "timed out after 0.6 s") and zero[1] < 1.3
    ),
    error_in_backward: lambda zero, one: is_error(zero, "RuntimeError", "timed out after 0.6 s over MPI"),
}


#: The same by name.
PROMISES = {function.__name__: holds for function, holds in BEHAVIOUR.items()}

SEEN_BY_THE_GUARD = {"all_reduce", "broadcast", "all_gather", "reduce_scatter"}


def as_guarded(over_gloo: list[Any]) -> dict[str, Holds]:
    """On two ranks: what each operation gives over gloo, with the guard and without; and the guard saw them end."""

    def holds(*seen: Any) -> bool:
        return all(
            plain == over_gloo[rank] and same and set(operations) >= SEEN_BY_THE_GUARD and outstanding == []
            for rank, (plain, same, operations, outstanding) in enumerate(seen)
        )

    return {"guarded": holds}
