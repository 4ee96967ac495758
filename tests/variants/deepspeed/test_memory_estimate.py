"""The estimate of memory against the tensors of real engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.deepspeed.memory_estimate import estimate_memory
from tests.helpers import run_ranks

HIDDEN = 512


ENGINES = [(1, "bf16"), (2, "bf16"), (3, "bf16"), (2, "float32"), (3, "float32")]


def parts_of_engines() -> list[dict[str, int]]:
    deepspeed = import_deepspeed("cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does it, and nothing is compiled
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return [parts_of_engine(deepspeed, stage, dtype) for stage, dtype in ENGINES]


def parts_of_engine(deepspeed: Any, stage: int, dtype: str) -> dict[str, int]:
    """Sizes of the tensors of a real engine after a step, on this rank."""
    model = torch.nn.Sequential(*[torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 10_000,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    optimizer = torch.optim.Adam(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inputs = torch.ones(1, HIDDEN, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    engine.backward(engine(inputs).sum())
    engine.step()

    def size(tensors: Any) -> int:
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    zero = engine.optimizer
    whole = list(engine.module.parameters())
    weights = size([p.ds_tensor for p in whole] if stage == 3 else whole)
    masters = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    states = [t for state in zero.optimizer.state.values() for t in state.values() if t.dim()]
    return {
        "weights": weights,
        # Separate from the weights: at stage 3 in float32 DeepSpeed means to share them, and compares a device with
        # its name to find out whether it can.
        "master_weights": size([*whole, *masters]) - size(whole),
        "optimizer_state": size(states),
    }


def test_against_the_tensors_of_real_engines() -> None:
    of_ranks = run_ranks(2, parts_of_engines, timeout=180)
    for (stage, dtype), *found in zip(ENGINES, *of_ranks, strict=True):
        expected = estimate_memory(
            parameters=4 * HIDDEN**2,
            largest_layer=HIDDEN**2,
            ranks=2,
            ranks_per_node=2,
            stage=stage,
            precision="bf16-mixed" if dtype == "bf16" else "32-true",
        ).device
        for parts in found:
            for part, size in parts.items():
                # What is flattened is padded a little.
                assert size == pytest.approx(getattr(expected, part), rel=0.01), (stage, dtype, part)
