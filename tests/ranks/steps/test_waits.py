"""Where a training step makes the host wait for the device, which a GPU would otherwise work behind: each has a reason.

On the CPU the calls are counted that read a tensor, on a GPU the waits that torch itself reports.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import lightning_lockstep as lockstep
from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep._lightning import Callback
from tests.harness import chosen_device, run_ranks
from tests.models.strategies.fsdp_models import LogsLoss, fit, fsdp

#: What reads a tensor's values, by the names of Python and torch.
READS = {
    "__bool__", "__float__", "__index__", "__int__", "allclose", "cpu", "equal", "is_nonzero", "item",
    "masked_select", "nonzero", "numpy", "tolist", "unique",
}  # fmt: skip

# Where the package reads, and why.
#: A bad step must be known before its weights change. All that is looked at is read at once.
CHECK = "numerics/statistics.py any_bad"
#: What has been copied to the host behind the device's back (an event says when it is there), or was made there.
ON_HOST = {"replicas/checksums.py numbers", "distributed/coordination/communicator.py agree"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # callbacks and their options, options of the strategy, waits in each step
    "watch": ({}, {}, 0),
    "verify": ({}, {"guard": "verify"}, 0),
    "join": ({}, {"uneven_inputs": "join"}, 0),
    "AutoBatchSize": ({"AutoBatchSize": {"mode": "off", "on_oom": "split"}}, {}, 0),
    "OverflowDetector": ({"OverflowDetector": {}}, {}, 1),
    "OverflowDetector, hooks": ({"OverflowDetector": {"mode": "hooks"}}, {}, 1),
    "OverflowDetector, skip": ({"OverflowDetector": {"action": "skip"}}, {}, 1),
    "ReplicaCheck": ({"ReplicaCheck": {"every_n_steps": 100}}, {}, 0),
    # A check among these steps, with the batches before it.
    "ReplicaCheck, checks": ({"ReplicaCheck": {"every_n_steps": 5}}, {}, 0),
    "SyncedEarlyStopping": (
        {"SyncedEarlyStopping": {"monitor": "loss", "check_on_train_epoch_end": True}},
        {},
        0,
    ),
    "others": (
        {
            "FP32Modules": {"modules": ["head"]},
            "RankOrderedLogging": {"files": None},
            "StaticShapes": {},
            "StopTogether": {},
            "StragglerMonitor": {"every_n_steps": 5},
        },
        {},
        0,
    ),
    "FSDP": ({}, {"shard": "Block"}, 0),
    "FSDP, OverflowDetector": ({"OverflowDetector": {}}, {"shard": "Block"}, 1),
}
FIRST, STEPS = 9, 2  # in the middle of the third epoch


class Reads(TorchFunctionMode):
    """Counts reads by the function of the package that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            place: Any = sys._getframe(1)
            while place is not None and "/torch/" in place.f_code.co_filename:
                place = place.f_back
            if place is not None and "lightning_lockstep/" in place.f_code.co_filename:
                file = place.f_code.co_filename.rpartition("lightning_lockstep/")[2]
                self.found[f"{file} {place.f_code.co_name}"] += 1
        return func(*args, **(kwargs or {}))


class First(Callback):
    """Counts from the start of a step to the end of the last one; stands before all other callbacks."""

    def __init__(self) -> None:
        self.reads = Reads()
        self.warned: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == FIRST:
            if chosen_device() == "cuda":
                self.catching = warnings.catch_warnings(record=True)
                self.warned = self.catching.__enter__()
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
            else:
                self.reads.__enter__()
        if trainer.global_step == FIRST + STEPS:
            self.end()

    def end(self) -> None:
        if self.warned is None:
            self.reads.__exit__(None, None, None)
            return
        torch.cuda.set_sync_debug_mode("default")
        self.catching.__exit__(None, None, None)
        for one in self.warned:
            if "synchronizing CUDA" in str(one.message) and "lightning_lockstep/" in one.filename:
                self.reads.found[f"{one.filename.rpartition('lightning_lockstep/')[2]}, line {one.lineno}"] += 1


def counted(ranks: int, cases: list[str]) -> dict[str, dict[str, int]]:
    found = {}
    for name in cases:
        callbacks, options, _ = CASES[name]
        first = First()
        strategy = fsdp(**options) if "shard" in options else LockstepDDPStrategy(**options)
        made = [getattr(lockstep, one)(**given) for one, given in callbacks.items()]
        fit(LogsLoss, ranks, strategy, callbacks=[first, *made], max_epochs=3)
        found[name] = dict(first.reads.found)
    return found


@pytest.fixture(scope="module")
def waits(device: str) -> dict[str, dict[str, int]]:
    alone = [name for name in CASES if name.startswith("FSDP") and device == "cuda"]  # it refuses a shared card
    together = [name for name in CASES if name not in alone]
    found = run_ranks(2, counted, 2, together, backend=None, timeout=170)[0]
    return found | (run_ranks(1, counted, 1, alone, backend=None, timeout=100)[0] if alone else {})


@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_for_the_device_where_it_must(case: str, waits: Any, device: str) -> None:
    found, allowed = waits[case], CASES[case][2] * STEPS
    elsewhere = {place: count for place, count in found.items() if place not in ON_HOST}
    if device == "cpu":
        assert elsewhere == ({CHECK: allowed} if allowed else {})
    else:
        assert sum(found.values()) <= allowed, found
