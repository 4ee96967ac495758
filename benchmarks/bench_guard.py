"""What guard="watch" costs: step time and a small all_reduce with and without it, memory, and how soon it speaks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.engine import Comparison, Report, Samples, Table, interleave
from lightning_lockstep.distributed.guard.records import size_flight_recorder
from lightning_lockstep.errors import LockstepError
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.helpers import chosen_device, run_ranks, run_ranks_raw, run_script, wait_for_device

ROOT = Path(__file__).parent.parent
OFF, WATCH, NO_RECORDER = "off", "watch", "off, and torch's flight recorder off"
WIDTHS = {"1 M": [512, 1024, 512], "10 M": [1024, 3072, 2048, 512]}
# Goals: what a small all_reduce may take more [us], what 2,000 collectives may take of memory [MiB], and how long after
# ``stall_timeout`` (of a rank that ends: after its end) the last rank may get its error [s].
SMALL_AT_MOST, MEMORY_AT_MOST = 5.0, 1.0
ERROR_AFTER = {"calls something else": (True, 2.0), "sleeps": (True, 2.0), "is killed": (False, 3.0)}
# Torch needs 2 to 3 s to load what names the place of a call, which begins at half of it.
STALL_TIMEOUT = 8.0

Act = Callable[[], Any]


def supervised(guard: Any, **options: Any) -> RankSupervisor:
    supervisor = RankSupervisor(SupervisorSettings(guard=guard, grace_period=6.0, **options))
    supervisor.ranks_have_met(prints_report=dist.get_rank() == 0)
    return supervisor


def small() -> Act:
    tensor = torch.ones(8, device=chosen_device())
    return lambda: dist.all_reduce(tensor)


def step(widths: list[int]) -> Act:
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


def seconds(act: Act, calls: int) -> float:
    """Median of many calls."""
    found = []
    for _ in range(calls):
        started = time.perf_counter()
        act()
        wait_for_device()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def in_turn(counts: dict[str, int], rounds: int) -> dict[str, Samples]:
    """Watch and off in turn on the same ranks."""
    torch.set_num_threads(1)
    acts = {"small": small(), **{name: step(widths) for name, widths in WIDTHS.items()}}
    samples: dict[str, Samples] = {}
    for name, act in acts.items():

        def sample(guard: str, act: Act = act, count: int = counts[name]) -> float:
            supervised(guard)
            return seconds(act, count)

        samples[name] = interleave(
            {guard: partial(sample, guard) for guard in (OFF, WATCH)}, rounds=rounds, warmup=1
        )
    return samples


def one_process(guard: str, calls: int) -> dict[str, float]:
    """A small all_reduce, and the memory that all calls have taken, in a process of its own."""
    torch.set_num_threads(1)
    size_flight_recorder()
    dist.init_process_group("gloo")
    try:
        act = small()
        seconds(act, 50)
        before = psutil.Process().memory_info().rss
        supervised(guard)
        took = seconds(act, calls)
        return {"seconds": took, "MiB": (psutil.Process().memory_info().rss - before) / 2**20}
    finally:
        dist.destroy_process_group()


def apart(size: int, calls: int, rounds: int) -> dict[str, Samples]:
    """The variants in turn, each in interpreters of their own: of a fork, memory that it shares would count too."""
    found: dict[str, Samples] = {"seconds": {}, "MiB": {}}
    variants = {
        OFF: (OFF, {}),
        WATCH: (WATCH, {}),
        NO_RECORDER: (OFF, {"TORCH_FR_BUFFER_SIZE": "0"}),
    }
    for number in range(rounds):
        for name, (guard, environment) in list(variants.items())[:: 1 if number % 2 else -1]:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={size}",
                "--no-python",
            ]
            program = [sys.executable, "-m", "benchmarks.bench_guard", guard, str(calls)]
            outcome = run_script([*command, *program], timeout=120, cwd=ROOT, env=environment, fresh=True)
            found_values = [line for line in outcome.stdout.splitlines() if line.startswith("{")]
            if outcome.returncode or not found_values:
                raise RuntimeError(outcome.output)
            for kind, value in json.loads(found_values[0]).items():
                found[kind].setdefault(name, []).append(value)
    return found


def part_ways(case: str) -> tuple[float, str]:
    """Return when this rank got its error, after the ranks have parted ways, and of which type."""
    supervisor = supervised(WATCH, stall_timeout=STALL_TIMEOUT)

    def work() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            if case == "sleeps":
                time.sleep(100)
            if case == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            dist.broadcast(torch.ones(4), 0)
        dist.all_reduce(torch.ones(4))

    started = time.time()
    try:
        supervisor.run(work)
    except (LockstepError, RuntimeError) as error:
        return time.time() - started, type(error).__name__
    return time.time() - started, "no error"


def delays(rounds: int) -> Samples:
    """Seconds from the divergence to the error on the last rank."""
    found: Samples = {}
    for _ in range(rounds):
        for case in ERROR_AFTER:
            outcomes = run_ranks_raw(2, part_ways, case, timeout=60)
            times = [outcome.value[0] for outcome in outcomes if outcome.value is not None]
            found.setdefault(case, []).append(max(times))
    return found


def delay_table(found: Samples) -> Table:
    """How long after the moment from which it can be known the last rank got its error; the slowest run counts."""
    rows = []
    for case, values in found.items():
        waits, limit = ERROR_AFTER[case]
        limit += STALL_TIMEOUT if waits else 0.0
        verdict = "reached" if max(values) <= limit else "missed"
        median, slowest = f"{statistics.median(values):.2f}", f"{max(values):.2f}"
        rows.append((f"rank 1 {case}", median, slowest, f"<= {limit:g}", verdict))
    title = f"From the divergence to the error on the last of 2 ranks, stall_timeout={STALL_TIMEOUT:g}"
    return Table(title, ("divergence", "median [s]", "slowest [s]", "goal", "verdict"), rows)


def small_comparison(title: str, samples: Samples, peer: str) -> Comparison:
    """A small all_reduce, whose goal is a difference."""
    goal = {WATCH: SMALL_AT_MOST}
    return Comparison(title, samples, peer=peer, unit="us", scale=1e6, at_most=goal, by="difference")


def run(quick: bool) -> Report:
    """Everything, one after the other."""
    rounds = 3 if quick else 11
    counts = {"small": 300, "1 M": 30, "10 M": 8}
    tables = []
    for size in (2, 4):
        samples = run_ranks(size, in_turn, counts, rounds, timeout=400)[0]
        for name, limit in (("1 M", 1.02), ("10 M", 1.01)):
            title = f"DDP step, {name} parameters, {size} ranks"
            tables.append(Comparison(title, samples[name], peer=OFF, at_most={WATCH: limit}))
        tables.append(small_comparison(f"all_reduce of 8 float32, {size} ranks", samples["small"], OFF))
    if chosen_device() == "cuda":
        return Report("guard='watch' over off, gloo", tables, ["The ranks share the card."])
    found = apart(2, 2000, 2 if quick else 7)
    tables.append(
        small_comparison(
            "all_reduce of 8 float32, 2 ranks, a process each time", found["seconds"], NO_RECORDER
        )
    )
    tables.append(
        Comparison(
            "Memory that the guard and 2,000 collectives took, per rank",
            found["MiB"],
            peer=NO_RECORDER,
            unit="MiB",
            scale=1.0,
            at_most={WATCH: MEMORY_AT_MOST},
            by="difference",
        )
    )
    tables.append(delay_table(delays(2 if quick else 5)))
    notes = [
        "In torch 2.13 the flight recorder is on unless TORCH_FR_BUFFER_SIZE=0, so guard=off has it too.",
    ]
    return Report("guard='watch' over off, gloo", tables, notes)


if __name__ == "__main__":
    measured = one_process(sys.argv[1], int(sys.argv[2]))
    if os.environ["RANK"] == "0":
        print(json.dumps(measured), flush=True)
