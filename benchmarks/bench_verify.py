"""guard="verify" over torch's TORCH_DISTRIBUTED_DEBUG=DETAIL and Accelerate's debug mode, 2 and 4 ranks, gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engine import Comparison, Report, Samples, interleave
from tests.helpers import chosen_device, run_ranks, wait_for_device

PLAIN, VERIFY, DETAIL, ACCELERATE = "plain", "verify", "DETAIL", "Accelerate's debug mode"
CALLS = {2: 150, 4: 40}  # per sample, by number of ranks
STEPS = 8

Act = Callable[[], Any]


def reduced() -> Act:
    tensor = torch.ones(8, device=chosen_device())
    return lambda: dist.all_reduce(tensor)


def gathered() -> Act:
    tensor = torch.ones(8, device=chosen_device())
    places = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    return lambda: dist.all_gather(places, tensor)


def gathered_by_accelerate() -> Act:
    from accelerate.utils import gather

    tensor = torch.ones(8)
    return lambda: gather(tensor)


def step() -> Act:
    """Forward, backward, one flat all-reduce of the gradients, a step: torch's DDP does not run under DETAIL."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.Linear(512, 10)
    ).to(chosen_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 256, device=chosen_device())
    labels = torch.randint(10, (64,), device=chosen_device())

    def act() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        flat = torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])
        dist.all_reduce(flat)
        start = 0
        for parameter in model.parameters():
            parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
        optimizer.step()

    return act


def seconds(act: Act, calls: int) -> float:
    """Median of many calls, each after a barrier."""
    found = []
    for _ in range(calls):
        dist.barrier()
        wait_for_device()
        started = time.perf_counter()
        act()
        wait_for_device()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


@contextmanager
def verified() -> Iterator[None]:
    from lightning_lockstep.distributed.guard.verify import CallVerifier

    verifier = CallVerifier()
    verifier.start()
    try:
        yield
    finally:
        verifier.stop()


@contextmanager
def accelerate_debug() -> Iterator[None]:
    from accelerate.state import PartialState

    PartialState(cpu=True).debug = True
    try:
        yield
    finally:
        PartialState().debug = False


def measured(
    make: dict[str, Callable[[], Act]], contexts: dict[str, Any], calls: int, rounds: int
) -> Samples:
    """Seconds of a call by variant, in turn on the same ranks."""
    acts = {name: make[name]() for name in contexts}

    def sample(name: str) -> float:
        with contexts[name]():
            acts[name]()  # the connections of the verifier are made at the first collective
            return seconds(acts[name], calls)

    return interleave({name: lambda name=name: sample(name) for name in contexts}, rounds=rounds, warmup=1)


def in_one_process(calls: int, steps: int, rounds: int) -> dict[str, Samples]:
    """What can be switched on and off."""
    torch.set_num_threads(1)
    both = {PLAIN: nullcontext, VERIFY: verified}
    # Accelerate gives each rank a card of its own, which two ranks that share one have not.
    three = {**both, **({ACCELERATE: accelerate_debug} if chosen_device() == "cpu" else {})}
    return {
        "all_reduce": measured(dict.fromkeys(both, reduced), both, calls, rounds),
        "all_gather": measured(
            {**dict.fromkeys(both, gathered), ACCELERATE: gathered_by_accelerate}, three, calls, rounds
        ),
        "step": measured(dict.fromkeys(both, step), both, steps, rounds),
    }


def one_sample(variant: str, calls: int, steps: int) -> dict[str, float]:
    """One sample of each measurement in a process of its own, which is what DETAIL needs."""
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()  # read at import, and this process is forked from one that has imported torch
    dist.init_process_group("gloo")
    try:
        assert (dist.get_debug_level() == dist.DebugLevel.DETAIL) == (variant == DETAIL)
        return one_sample_of_each(variant, calls, steps)
    finally:
        dist.destroy_process_group()


def one_sample_of_each(variant: str, calls: int, steps: int) -> dict[str, float]:
    context = verified() if variant == VERIFY else nullcontext()
    makes = {"all_reduce": (reduced, calls), "all_gather": (gathered, calls), "step": (step, steps)}
    found = {}
    with context:
        for name, (make, count) in makes.items():
            act = make()
            seconds(act, 3)
            found[name] = seconds(act, count)
    return found


def in_processes(size: int, calls: int, rounds: int) -> dict[str, Samples]:
    """The variants, each in fresh processes, in turn."""
    environment = {DETAIL: {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}
    samples: dict[str, Samples] = {
        name: {PLAIN: [], VERIFY: [], DETAIL: []} for name in ("all_reduce", "all_gather", "step")
    }
    variants = [PLAIN, VERIFY, DETAIL]
    for number in range(rounds):
        shift = number % len(variants)
        for variant in variants[shift:] + variants[:shift]:
            print(f"{size} ranks, round {number + 1}/{rounds}: {variant}")
            found = run_ranks(
                size, one_sample, variant, calls, STEPS, env=environment.get(variant), backend=None
            )[0]
            for name, value in found.items():
                samples[name][variant].append(value)
    return samples


def run(quick: bool) -> Report:
    rounds = 2 if quick else 7
    tables = []
    for size, calls in CALLS.items():
        calls = calls // 5 if quick else calls
        for name, samples in in_processes(size, calls, rounds).items():
            title = f"{name}, {size} ranks, a process each time"
            tables.append(Comparison(title, samples, peer=DETAIL, at_most={VERIFY: 1.0}))
        together = run_ranks(size, in_one_process, calls, STEPS, rounds, timeout=240)[0]
        for name, samples in together.items():
            title = f"{name}, {size} ranks, the same processes"
            if ACCELERATE in samples:
                tables.append(Comparison(title, samples, peer=ACCELERATE, at_most={VERIFY: 1 / 3}))
            else:
                tables.append(Comparison(title, samples, peer=PLAIN))
    notes = [
        "Each sample is the median of many calls, each after a barrier, which is outside of what is timed.",
        "all_reduce and all_gather are of 8 float32 values; a step is forward and backward of 400,000 parameters and"
        " one all-reduce of all gradients. DistributedDataParallel itself ends with an error under DETAIL with gloo"
        " in torch 2.13, so it has no peer to be compared with.",
        "Accelerate's debug mode is that of ACCELERATE_DEBUG_MODE=1, which its state reads once, switched on and off.",
        "4 ranks on fewer cores mostly measure the scheduler.",
    ]
    return Report("guard='verify' over the debug modes of torch and Accelerate", tables, notes)
