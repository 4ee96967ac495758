"""AutoBatchSize under real DeepSpeed on two CPU ranks: the size, its memory, and a run that is as without a search.

Other stages and options are in ``tests/variants``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_lockstep import AutoBatchSize, EffectiveBatchSize
from lightning_lockstep.errors import BatchSizeError
from tests.harness import run_ranks
from tests.models.deepspeed.batch_size import (
    RUNS,
    Walled,
    check_runs,
    engine,
    other_loops,
    trainer,
    with_and_without,
)

SOME = [run for run in RUNS if run[:2] == (3, "forward")]


def refusals(folder: str) -> list[str]:
    def text(callback: Any, strategy: Any) -> str:
        try:
            trainer(strategy, callback, default_root_dir=folder).fit(Walled())
        except BatchSizeError as error:
            return str(error)
        return "no error"

    return [
        text(AutoBatchSize(), engine(2, train_micro_batch_size_per_gpu=4)),
        text(AutoBatchSize(), engine(1, train_batch_size=16)),
        text(EffectiveBatchSize(64), engine(2, gradient_accumulation_steps=2)),
        text(AutoBatchSize(), engine(2, gradient_accumulation_steps=2)),
        text(AutoBatchSize(on_oom="split"), 2),
        text(AutoBatchSize(), engine(2, flops_profiler={"enabled": True})),
    ]


def searches(folder: str) -> dict[str, Any]:
    return {
        "runs": with_and_without(folder, SOME),
        "loops": other_loops(folder),
        "refused": refusals(folder),
    }


def test_a_search_is_exact_keeps_the_global_batch_or_is_refused(tmp_path: Path) -> None:
    for found in run_ranks(2, searches, str(tmp_path), backend=None, timeout=120):
        assert len(found["runs"]) == 1
        check_runs(found["runs"])
        evaluated, fitted, kept = found["loops"]
        assert evaluated == [10, 10] and fitted == (8, 4, 8, 4, 4, 4)
        assert kept == (8, 2, 8, 2, 4, 4), "the global batch of 32 that is configured"
        micro, whole, accumulation, accumulated, split, profiler = found["refused"]
        assert micro.startswith("AutoBatchSize is to choose the batch size, and train_micro_batch_size_per_gpu=4")
        assert "train_batch_size=16 in the config of DeepSpeed fixes it" in whole
        assert "EffectiveBatchSize(64), and gradient_accumulation_steps=2" in accumulation
        assert "sets the accumulation, and gradient_accumulation_steps=2 in the config" in accumulated
        assert "on_oom='split'" in split and "on_oom='raise'" in split
        assert "flops_profiler" in profiler
