"""What the table of limits says of a CPU, asked of DeepSpeed itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.config_parsing import TrainerValues, completed
from lightning_lockstep.deepspeed.device_support import refuse_or_adapt
from lightning_lockstep.deepspeed.engine import adopt_process_group
from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.errors import ConfigurationError
from tests.harness import run_ranks
from tests.models.deepspeed.example_configs import PARTLY_OFFLOADED, optimizer, zero

#: What the table of limits says of a CPU, in configs for two ranks.
REFUSED = {
    "quantized weights": zero(zero_quantized_weights=True),
    "quantized frozen weights": zero(zero_quantized_nontrainable_weights=True),
    "quantized gradients": zero(zero_quantized_gradients=True),
    "GPUDirect Storage": zero() | {"aio": {"use_gds": True}},
    "client optimizer, offloaded in part": PARTLY_OFFLOADED,
    "offloaded in part": PARTLY_OFFLOADED | optimizer("AdamW", torch_adam=True),
    "SuperOffload": zero(offload_optimizer={"device": "cpu", "super_offload": True})
    | optimizer("AdamW", torch_adam=True),
    "Lamb": optimizer("Lamb") | zero(),
    "Lion": optimizer("Lion") | zero(),
}
ACCEPTED = {
    "overlapping": zero(overlap_comm=True),
    "client optimizer": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "16 bits on the way": {"communication_data_type": "fp16", "zero_optimization": {"stage": 2}},
    "gradients that stage 2 would not quantize": {
        "zero_optimization": {"stage": 2, "zero_quantized_gradients": True}
    },
    "secondary partitions": zero(zero_hpz_partition_size=2),
    "pinned memory": zero(
        offload_param={"device": "cpu", "pin_memory": True},
        offload_optimizer={"device": "cpu", "pin_memory": True},
    )
    | optimizer("AdamW", torch_adam=True),
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
}


def try_on_a_rank(configs: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Train two steps with each config; returns what DeepSpeed said against it, an empty text if nothing."""
    deepspeed = import_deepspeed("cpu")
    adopt_process_group(int(os.environ["LOCAL_RANK"]), timedelta(seconds=60))
    return {name: try_one(deepspeed, config) for name, config in configs.items()}


def try_one(deepspeed: Any, config: dict[str, Any]) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    made = None if "optimizer" in config else torch.optim.AdamW(model.parameters())
    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=made,
            model_parameters=model.parameters() if made is None else None,
            config=completed(
                {**config, "zero_force_ds_cpu_optimizer": False}, TrainerValues(batch_size=2), 2
            ),
        )
        for _ in range(2):
            batch = torch.ones(2, 16, dtype=torch.bfloat16 if engine.bfloat16_enabled() else torch.float32)
            engine.backward(engine(batch).float().mean())
            engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_deepspeed_refuses_what_is_listed_and_nothing_else() -> None:
    configs, adapted = REFUSED | ACCEPTED, {}
    for name, config in REFUSED.items():
        with pytest.raises(ConfigurationError):
            refuse_or_adapt(config, "cpu", False)
        if name not in ("Lamb", "Lion"):  # there is nothing to put in its place
            adapted[f"{name}, adapted"] = refuse_or_adapt(config, "cpu", True)[0]
    assert all(refuse_or_adapt(config, "cpu", False) for config in ACCEPTED.values())
    said, of_the_other = run_ranks(2, try_on_a_rank, {**configs, **adapted}, timeout=300)
    assert {name for name, text in said.items() if text} == set(REFUSED), said
    assert {name for name, text in of_the_other.items() if text} == set(REFUSED), of_the_other
