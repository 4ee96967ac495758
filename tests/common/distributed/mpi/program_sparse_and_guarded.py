"""Sums of sparse tensors over mpi4py and over gloo, and each operation under the guard; writes down what differs."""

import itertools
import sys
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep.distributed.mpi.backend import MPIBackendOptions
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.common.distributed.every_operation import PARTS
from tests.common.distributed.mpi.program_behaviour import caught
from tests.common.distributed.mpi.ranks_meet import hand_back, meet

# The rows in which each rank has entries: some twice, some on one rank only.
ROWS = {
    "different numbers": [[0, 3, 3], [4], [1, 2, 0, 0]],
    "one rank has none": [[], [1, 1, 4], [2]],
    "none at all": [[], [], []],
    "large": [list(range(900)) * 3, [5], list(range(400, 997))],
}
HALF = (torch.float16, torch.bfloat16)
DTYPES = [torch.float32, torch.float64, *HALF, torch.int64, torch.uint8]
DENSE = [(), (20, 2)]


def sparse(rows, dtype, *, dense=(), dims=1, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 5, (len(rows), *dense), generator=generator).to(dtype)
    values = values / 3 if dtype.is_floating_point else values
    indices = torch.tensor([rows] * dims, dtype=torch.int64).view(dims, -1)
    return torch.sparse_coo_tensor(indices, values, (size,) * dims + dense)


def same(a, b):
    """Return whether two sums are equal to the bit; ours of a half precision are rounded once, not each time."""
    if not (a.is_coalesced() and a.dtype == b.dtype and a.shape == b.shape):
        return False
    if a.dtype in HALF:
        return torch.allclose(a.float().to_dense(), b.float().to_dense(), rtol=2e-2)
    return torch.equal(a.indices(), b.indices()) and torch.equal(a.values(), b.values())


def sums(rank, groups):
    """Return what differs from gloo, and how many cases there were."""
    wrong, count = [], 0
    options = itertools.product(ROWS, DTYPES, DENSE, (1, 2), (False, True), (False, True))
    for name, dtype, dense, dims, coalesced, unchecked in options:
        if name == "large" and (dtype not in (torch.float32, torch.float64) or dims > 1):
            continue
        size = 1_000 if name == "large" else 5
        t = sparse(ROWS[name][rank], dtype, dense=dense, dims=dims, size=size, seed=rank)
        t = t.coalesce() if coalesced else t
        got, wanted = t.clone(), t.clone()
        dist.all_reduce(got, group=groups["unchecked" if unchecked else "mpi4py"])
        # gloo cannot add half precisions.
        wanted = wanted.float() if dtype in HALF else wanted
        dist.all_reduce(wanted, group=groups["gloo"])
        count += 1
        if not same(got, wanted.to(dtype)):
            wrong.append(f"{name} {dtype} {dense} {dims} {coalesced}: {got} instead of {wanted}")
    return [wrong, count]


def asynchronous(rank, groups):
    t, dense = sparse([rank], torch.float32), torch.ones(3)
    works = [dist.all_reduce(one, group=groups["mpi4py"], async_op=True) for one in (t, dense, t.clone())]
    value = works[0].get_future().wait()
    for work in works:
        work.wait()
    return [value[0] is t, t.indices().tolist(), dense.tolist()]


def embedding(rank, groups):
    """Train an embedding under DDP; return whether losses, gradients and weights equal those over gloo.

    To the bit on two ranks; on more, gloo adds the gradients of the dense layer in another order.
    """
    found = []
    for name in ("mpi4py", "gloo"):
        torch.manual_seed(1)
        table = torch.nn.Embedding(200, 8, sparse=True)
        model = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(32, 1))
        wrapped = DistributedDataParallel(model, process_group=groups[name])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(rank)
        steps = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = wrapped(torch.randint(0, 200, (6, 4), generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            steps.append((loss.item(), table.weight.grad.to_dense()))
        found.append((steps, table.weight.detach().clone(), table.weight.grad.layout is torch.sparse_coo))
    (ours, our_weight, a_sparse), (theirs, their_weight, _) = found
    equal = torch.equal if dist.get_world_size() == 2 else torch.allclose
    losses = equal(torch.tensor([loss for loss, _ in ours]), torch.tensor([loss for loss, _ in theirs]))
    gradients = all(equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    return [losses and gradients, equal(our_weight, their_weight), a_sparse]


def refused(rank, groups):
    """Return the errors of calls that no rank may make; afterwards the group goes on."""
    group = groups["mpi4py"]
    t = sparse([rank], torch.float32)
    found = [
        caught(dist.all_reduce, t, dist.ReduceOp.MAX, group),
        caught(dist.all_reduce, t, dist.ReduceOp.AVG, group),
        caught(dist.all_reduce, sparse([rank], torch.bool), group=group),
        caught(dist.all_reduce, t.to_dense().view(1, -1).to_sparse_csr(), group=group),
        caught(dist.broadcast, t, 0, group),
        caught(dist.reduce, t, 0, group=group),
        caught(dist.all_reduce_coalesced, [t, t], group=group),
    ]
    return [found, _sum_of_one(group)]


def different(rank, groups):
    """Return the errors of calls that differ between rank 0 and the others; afterwards the group goes on."""
    group, first = groups["mpi4py"], rank == 0
    f32 = torch.float32
    found = [
        caught(dist.all_reduce, sparse([1], f32, size=5 + first), group=group),
        caught(dist.all_reduce, sparse([1], torch.float64 if first else f32), group=group),
        caught(dist.all_reduce, sparse([1], f32, dense=(5,), dims=1), group=group)
        if first
        else caught(dist.all_reduce, sparse([1], f32, dims=2), group=group),
        caught(dist.all_reduce, torch.ones(5) if first else sparse([1], f32), group=group),
        caught(dist.all_reduce, sparse([1], f32), *([dist.ReduceOp.MIN] if first else []), group=group),
    ]
    return [found, _sum_of_one(group)]


def _sum_of_one(group):
    t = sparse([1], torch.int64)
    dist.all_reduce(t, group=group)
    return len(t.values())


def guarded(rank, guard):
    """Each operation without the guard and with it: the results, what it has seen, and what it still waits for."""
    plain = [part(rank) for part in PARTS]
    supervisor = RankSupervisor(SupervisorSettings(guard=guard, stall_timeout=20.0))
    supervisor.ranks_have_met(prints_report=rank == 0)
    under_guard = supervisor.run(lambda: [part(rank) for part in PARTS])
    state = supervisor.guard.watch.state()
    operations = sorted({one.call.operation for one in state.calls if one.call.number})
    dist.barrier()
    supervisor.guard.stop()
    return [plain, under_guard == plain, operations, [list(one) for one in state.outstanding]]


def main():
    warnings.simplefilter("ignore")
    rank, size = meet()
    groups = {name: dist.new_group(backend=name) for name in ("mpi4py", "gloo")}
    groups["unchecked"] = dist.new_group(pg_options=MPIBackendOptions(check=False))
    seen = {}
    for function in (sums, asynchronous, embedding, refused, different):
        seen[function.__name__] = function(rank, groups)
    if size == 2:
        seen["guarded"] = guarded(rank, "watch" if "--watch" in sys.argv else "verify")
    hand_back(rank, seen)


if __name__ == "__main__":
    main()
