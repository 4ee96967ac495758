"""Every operation over mpi4py and over gloo, gather_uneven and batch norm, on the same tensors: what differs."""

import itertools
import warnings

import torch
import torch.distributed as dist

from tests.models.distributed import global_norms as norms
from tests.models.distributed import uneven_gathers as uneven
from tests.models.distributed.mpi.behaviour import Holds, all_are
from tests.models.distributed.mpi.launch import meet

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
SHAPES = ["scalar", "empty", "vector", "strided", "large"]
LARGE = 40_001
R = dist.ReduceOp
REDUCTIONS = [R.SUM, R.PRODUCT, R.MIN, R.MAX, R.AVG, R.BAND, R.BOR, R.BXOR]


def tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "scalar": (),
        "empty": (0, 3),
        "vector": (7,),
        "strided": (6, 4),
        "large": (LARGE,),
    }[shape]
    whole = torch.randint(1, 5, sizes, generator=generator)
    made = whole.to(dtype) / (4 if dtype.is_floating_point else 1) if dtype.is_floating_point else whole.to(dtype)
    return made.t() if shape == "strided" else made


class Side:
    """One backend's view of a group."""

    def __init__(self, name, group):
        self.name, self.group = name, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def reduce_all(self, t, op):
        dist.all_reduce(t, op, self.group)
        return [t]

    def reduce(self, t, op):
        dist.reduce(t, op=op, group=self.group, group_dst=self.size - 1)
        return [t] if self.rank == self.size - 1 else []

    def broadcast(self, t, _):
        dist.broadcast(t, group=self.group, group_src=self.size - 1)
        return [t]

    def all_gather(self, t, _):
        places = [torch.empty_like(t) for _ in range(self.size)]
        dist.all_gather(places, t, self.group)
        return places

    def all_gather_into(self, t, _):
        whole = torch.empty(self.size * t.numel(), dtype=t.dtype)
        dist.all_gather_into_tensor(whole, t.contiguous().view(-1), self.group)
        return [whole]

    def gather(self, t, _):
        places = [torch.empty_like(t) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(t, places, group=self.group, group_dst=0)
        return places or []

    def scatter(self, t, _):
        target = torch.empty_like(t)
        parts = [t + i if t.dtype != torch.bool else t for i in range(self.size)] if self.rank == 0 else None
        dist.scatter(target, parts, group=self.group, group_src=0)
        return [target]

    def reduce_scatter(self, t, op):
        target = torch.empty_like(t)
        dist.reduce_scatter(target, [t.clone() for _ in range(self.size)], op, self.group)
        return [target]

    def reduce_scatter_into(self, t, op):
        target = torch.empty(t.numel(), dtype=t.dtype)
        dist.reduce_scatter_tensor(target, t.contiguous().view(-1).repeat(self.size), op, self.group)
        return [target]

    def all_to_all_single(self, t, _):
        source = t.contiguous().view(-1).repeat(self.size)
        target = torch.empty_like(source)
        dist.all_to_all_single(target, source, group=self.group)
        return [target]

    def all_to_all_uneven(self, t, _):
        flat = t.contiguous().view(-1)[:3]
        out = [i + 1 for i in range(self.size)]
        source = flat[:1].repeat(sum(out)) if flat.numel() else torch.zeros(sum(out), dtype=t.dtype)
        target = torch.empty(self.size * (self.rank + 1), dtype=t.dtype)
        dist.all_to_all_single(target, source, [self.rank + 1] * self.size, out, group=self.group)
        return [target]

    def all_gather_coalesced(self, t, _):
        # Two tensors and as many ranks as that: a transposed answer would have the right shapes.
        sent = [t, t.flip(0) if t.dim() else t]
        places = [[torch.empty_like(one) for one in sent] for _ in range(self.size)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_gather_coalesced(places, sent, self.group)
        return [one for of_rank in places for one in of_rank]

    def coalesced(self, t, op):
        tensors = [t.clone(), t.clone()]
        with dist._coalescing_manager(self.group):
            for one in tensors:
                dist.all_reduce(one, op, self.group)
        return tensors


REDUCING = ("reduce_all", "reduce", "reduce_scatter", "reduce_scatter_into", "coalesced")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_into",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "all_to_all_single",
    "all_to_all_uneven",
)


def cases(is_whole, every):
    """Give the operations with their arguments: every one, or those of some dtypes, in a sub-group of two shapes."""
    dtypes, shapes = [*FLOATS, *INTEGERS, torch.bool], SHAPES
    if not every:
        dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
        shapes = SHAPES if is_whole else ["vector", "strided"]
    for name, dtype, shape in itertools.product(MOVING, dtypes, shapes):
        yield name, dtype, shape, R.SUM
    for name, dtype, shape in itertools.product(REDUCING, dtypes, shapes):
        for op in REDUCTIONS:
            bits = op in (R.BAND, R.BOR, R.BXOR)
            if (bits and dtype.is_floating_point) or (op == R.AVG and dtype == torch.bool):
                continue
            # Every operation for all-reduce, some for the others: they share the code.
            if name == "reduce_all" or (op in (R.SUM, R.MAX) and shape in ("vector", "strided")):
                yield name, dtype, shape, op


def by_hand(name, group, t, op):
    """What gloo should have given where it has no such operation: from a gather of bytes."""
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, t.contiguous(), group)
    if name not in ("reduce_all", "reduce", "reduce_scatter", "coalesced"):
        return None
    wide = torch.stack([one.double() if one.dtype.is_floating_point else one.long() for one in everyone])
    if op in (R.SUM, R.AVG):
        result = wide.sum(0) / (len(everyone) if op == R.AVG else 1)
    elif op == R.PRODUCT:
        result = wide.prod(0)
    elif op == R.BXOR:
        result = wide[0]
        for one in wide[1:]:
            result = result ^ one
    else:
        result = wide.amin(0) if op in (R.MIN, R.BAND) else wide.amax(0)
    return result.to(t.dtype)


def compare(name, dtype, shape, op, mpi, gloo):
    t = tensor(shape, dtype, 100 + mpi.rank)
    got = getattr(mpi, name)(t.clone(memory_format=torch.preserve_format), op)
    try:
        wanted = getattr(gloo, name)(t.clone(), op)
    except (RuntimeError, ValueError) as error:
        expected = by_hand(name, gloo.group, t, op)
        wanted = None if expected is None else [expected] * len(got)
        if wanted is None:
            return f"gloo has no such operation ({str(error).splitlines()[0][:60]}), not compared"
    for a, b in zip(got, wanted, strict=True):
        exact = not dtype.is_floating_point or (mpi.size <= 2 and dtype in (torch.float32, torch.float64))
        if not torch.allclose(a.double(), b.double(), rtol=0 if exact else 2e-2, atol=0 if exact else 2e-2):
            return f"differs: {a.flatten()[:6].tolist()} instead of {b.flatten()[:6].tolist()}"
    return ""


def operations(every=False, cut=False):
    """Compare all operations, on this rank; reductions go to MPI in pieces of 8 MB, or cut ones of 64 bytes."""
    warnings.simplefilter("ignore")
    rank, size = meet()
    if cut:
        from lightning_lockstep.distributed.mpi import operations as of_mpi

        global LARGE
        of_mpi.PIECE, of_mpi.COUNT, LARGE = 64, 68, 1_001
    groups = [list(range(size))] + ([[size - 1, 0]] if size > 2 else []) + [[0]]
    found = {"cases": 0, "wrong": [], "not compared": 0, "groups": len(groups)}
    for ranks in groups:
        pair = [dist.new_group(sorted(ranks), backend=name) for name in ("mpi4py", "gloo")]
        if rank not in ranks:
            continue
        mpi, gloo = Side("mpi4py", pair[0]), Side("gloo", pair[1])
        for name, dtype, shape, op in cases(len(ranks) == size, every):
            try:
                wrong = compare(name, dtype, shape, op, mpi, gloo)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            found["cases"] += 1
            if wrong.endswith("not compared"):
                found["not compared"] += 1
            elif wrong:
                found["wrong"].append(f"{name} {dtype} {shape} {op} group {ranks}: {wrong}")
    numbers = torch.arange((2**12 if cut else 2**21) + 5) % 7  # the last piece is shorter
    large = (numbers * (rank + 1)).float()
    dist.all_reduce(large, group=dist.new_group(backend="mpi4py"))
    found["large"] = torch.equal(large, (numbers * sum(range(1, size + 1))).float())
    found["uneven"] = uneven.all_cases()
    found["norms"] = norms.wrong_ones(["images", "a rank of padding"])
    found["uneven mismatches"] = uneven.mismatches()
    dist.barrier()
    dist.destroy_process_group()
    return found


#: What must come of it.
OPERATIONS: dict[str, Holds] = {
    "wrong": all_are([]),
    "large": all_are(True),
    "cases": lambda *seen: seen[0] > 400,
    "uneven": lambda *seen: not any(any(one.values()) for one in seen),
    "norms": all_are([]),
    "uneven mismatches": lambda zero, *others: all(
        zero[name] == one[name] and zero[name].startswith("CollectiveMismatchError")
        for name in zero
        for one in others
        if name != "all wrong"
    ),
}
