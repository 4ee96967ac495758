"""What guard="watch" costs: a DDP step with and without it, 2 ranks over gloo."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._fit import WIDTHS
from benchmarks.engine import Comparison, Report, Samples, interleave
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.harness import chosen_device, run_ranks, wait_for_device

OFF, WATCH = "off", "watch"
CALLS = {"1 M": 30, "10 M": 8}  # of a sample
AT_MOST = {"1 M": 1.02, "10 M": 1.01}


def supervise(guard: Any) -> None:
    supervisor = RankSupervisor(SupervisorSettings(guard=guard, grace_period=6.0))
    supervisor.ranks_have_met(60.0, prints_report=dist.get_rank() == 0)


def step(widths: list[int]) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(chosen_device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, widths[0], device=chosen_device())

    def act() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return act


def seconds(act: Callable[[], None], calls: int) -> float:
    """Median of many calls."""
    found = []
    for _ in range(calls):
        started = time.perf_counter()
        act()
        wait_for_device()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def in_turn(model: str, rounds: int) -> Samples:
    """Watch and off in turn on the same ranks."""
    torch.set_num_threads(1)
    act = step(WIDTHS[model])

    def sample(guard: str) -> float:
        supervise(guard)
        return seconds(act, CALLS[model])

    return interleave({OFF: lambda: sample(OFF), WATCH: lambda: sample(WATCH)}, rounds=rounds, warmup=1)


def run(quick: bool) -> Report:
    tables = []
    for model in CALLS:
        samples = run_ranks(2, in_turn, model, 3 if quick else 11, timeout=400)[0]
        title = f"DDP step, {model} parameters, 2 ranks"
        tables.append(Comparison(title, samples, peer=OFF, at_most={WATCH: AT_MOST[model]}))
    notes = ["On a GPU the ranks share the card."] if chosen_device() == "cuda" else []
    return Report("guard='watch' over off, gloo", tables, notes)
