"""Small networks with batch norm on ranks that have met, over any backend, beside one process's on the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lockstep.distributed.coordination.global_norm import global_batch_norm
from lightning_lockstep.distributed.local_collectives import local_collectives
from lightning_lockstep.steps.sample_numbers import BatchPlace, SampleNumbers

FLOAT64, FLOAT32, BFLOAT16 = torch.float64, torch.float32, torch.bfloat16
PLACE = BatchPlace(0, 0, 0, 1, 1)


class Case(NamedTuple):
    kind: str
    rows: tuple[tuple[int, ...], ...]  # of each rank, in each micro-batch of an optimizer step
    dtype: torch.dtype = FLOAT64


BY_TURN = ((4, 3, 3, 3),)
CASES = {
    "images": Case("images", BY_TURN),
    "images, channels last": Case("channels last", BY_TURN),
    "images, cumulative average": Case("cumulative", BY_TURN),
    "rows, without parameters": Case("plain rows", BY_TURN),
    "sequences, without running statistics": Case("sequences", BY_TURN),
    "checkpointed": Case("checkpointed", BY_TURN),
    "a rank of padding": Case("images", ((6, 1, 6, 0),)),
    "rows on few ranks": Case("plain rows", ((2, 0, 1, 0),)),
    "accumulated": Case("images", ((4, 3, 3, 3), (2, 2, 2, 1), (1, 1, 0, 0))),
    "float32": Case("images", BY_TURN, FLOAT32),
    "bfloat16": Case("images", BY_TURN, BFLOAT16),
}
# The largest difference from one process that counts as none, of weights and running statistics.
TOLERANCES = {FLOAT64: 1e-12, FLOAT32: 1e-5, BFLOAT16: 0.05}


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "plain rows":
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    if kind == "sequences":
        return nn.Sequential(nn.Conv1d(6, 4, 2), nn.BatchNorm1d(4, track_running_stats=False), nn.Flatten())
    momentum = None if kind == "cumulative" else 0.1
    inner = Checkpointed if kind == "checkpointed" else nn.Sequential
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8, momentum=momentum),
        nn.ReLU(inplace=True),
        inner(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8, momentum=momentum), nn.Tanh()),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def samples(kind: str, count: int) -> Tensor:
    shape = {"plain rows": (6,), "sequences": (6, 5)}.get(kind, (3, 7, 7))
    drawn = torch.randn(count, *shape, generator=torch.Generator().manual_seed(count), dtype=FLOAT64)
    drawn = drawn * 3 + 50  # a mean far above the deviation
    return drawn.contiguous(memory_format=torch.channels_last) if kind == "channels last" else drawn


def trained(case: Case, counts: Sequence[int], parts: Sequence[range] | None = None) -> dict[str, Tensor]:
    """Return the state after two optimizer steps on micro-batches of this many samples, or on this rank's parts."""
    model = made(case.kind).to(case.dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = SampleNumbers(1, numbers=False, norm=True)
    for _ in range(2):
        for number, count in enumerate(counts):
            x = samples(case.kind, count).to(case.dtype)
            rows = list(range(count) if parts is None else parts[number])
            step: AbstractContextManager[None] = nullcontext()
            backward: AbstractContextManager[None] = nullcontext()
            if parts is not None:
                step, backward = norms.step(PLACE, 0, bool(rows)), norms.backward()
            with step:
                loss = model(x[rows or [0]]).square().mean(1).sum() * (bool(rows) / sum(counts))
            with backward:
                loss.backward()
        for parameter in model.parameters() if parts is not None else ():
            total = parameter.grad.double()  # type: ignore[union-attr]
            dist.all_reduce(total)
            parameter.grad.copy_(total)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def differences(names: Iterable[str] = CASES) -> dict[str, tuple[float, bool]]:
    """Return how far each case is from one process, and whether this rank's state is that of rank 0, bit by bit."""
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), {}
    for name in names:
        case = CASES[name]
        of_ranks = [(*rows, *[0] * ranks)[:ranks] for rows in case.rows]  # of those that there are
        counts = [sum(rows) for rows in of_ranks]
        firsts = [sum(rows[:rank]) for rows in of_ranks]
        parts = [range(first, first + rows[rank]) for first, rows in zip(firsts, of_ranks, strict=True)]
        alone, ours = trained(case, counts), trained(case, counts, parts)
        far = [float((ours[key].double() - alone[key].double()).abs().max()) for key in ours]
        row = torch.cat([value.double().flatten() for value in ours.values()])
        first = row.clone()
        dist.broadcast(first, 0)
        found[name] = max(far), torch.equal(row, first)
    return found


def wrong_ones(names: Iterable[str]) -> list[str]:
    return [name for name, (far, same) in differences(names).items() if far > TOLERANCES[CASES[name].dtype] or not same]


def single_value() -> str:
    """Return what is raised if all ranks together have one value."""
    try:
        global_batch_norm(torch.ones(1, 2), None, None, training=True, counts=dist.get_rank() == 0)
    except ValueError as error:
        return str(error)
    return ""


def apart() -> bool:
    """Return whether rank 1 alone, whose collectives are answered on it, gets what torch gives, of padding nothing."""
    x, same = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), True
    if dist.get_rank() == 1:
        with local_collectives():
            same = torch.allclose(
                global_batch_norm(x, None, None, training=True),
                F.batch_norm(x, None, None, training=True),
                atol=1e-6,
            )
            running = torch.full((3,), 2.0)
            padding = global_batch_norm(x, running, running, training=True, counts=False)
            same &= bool(padding.isfinite().all()) and bool(running.eq(2.0).all())
    dist.barrier()
    return same
