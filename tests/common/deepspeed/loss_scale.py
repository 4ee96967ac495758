"""Real engines of DeepSpeed whose loss overflows when a test says so; run in a rank."""

from __future__ import annotations

from typing import Any

import torch

from lightning_lockstep.deepspeed.engine_adapters import adapter_of
from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.deepspeed.precision import LossScaleHistory

FEATURES = 8
#: Stage, precision, the factor of each batch's loss, and options of the precision.
Run = tuple[int, str, list[float], dict[str, Any]]


def start_deepspeed() -> Any:
    deepspeed = import_deepspeed("cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does it, and nothing is compiled
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


class Explodes(torch.nn.Module):
    """Its loss is multiplied by what the test says, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1, bias=False)

    def forward(self, inputs: torch.Tensor, factor: float) -> torch.Tensor:
        return self.layer(inputs).float().sum() * factor


def train_all(runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    deepspeed = start_deepspeed()
    return {name: train(deepspeed, *run) for name, run in runs.items()}


def train(
    deepspeed: Any, stage: int, precision: str, factors: list[float], options: dict[str, Any]
) -> dict[str, Any]:
    """Train a real engine on batches whose losses have these factors; returns what is read after each step."""
    torch.manual_seed(0)
    model = Explodes()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True, **options}
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    outcomes, changed = [], []
    for factor in factors:
        before = weights_of(engine, stage)
        engine.backward(engine(torch.ones(1, FEATURES, dtype=dtype), factor))
        engine.step()
        outcomes.append(adapter_of(engine).outcome())
        changed.append(not torch.equal(before, weights_of(engine, stage)))
    history = LossScaleHistory()
    for outcome in outcomes:
        if outcome is not None:
            history.record(outcome)
    return {
        "outcomes": outcomes,
        "changed": changed,
        "skipped_steps": engine.skipped_steps,
        "verdict": history.verdict(),
    }


def weights_of(engine: Any, stage: int) -> torch.Tensor:
    """The float32 weights of this rank, which a skipped step does not change."""
    zero = engine.optimizer
    groups = {
        1: "single_partition_of_fp32_groups",
        2: "single_partition_of_fp32_groups",
        3: "fp32_partitioned_groups_flat",
    }
    if stage == 0 and hasattr(zero, "fp32_groups"):
        tensors = [tensor for group in zero.fp32_groups for tensor in group]
    else:
        tensors = getattr(zero, groups.get(stage, "fp32_groups_flat"), None) or list(
            engine.module.parameters()
        )
    return torch.cat([tensor.detach().clone().flatten() for tensor in tensors])
