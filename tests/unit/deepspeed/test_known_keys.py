"""Every key that DeepSpeed reads is known, no other, and a misspelt one is a fault that names the right one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed.known_keys import check_keys
from tests.common.deepspeed.example_configs import EXAMPLES

pytest.importorskip("deepspeed")


def faults_of(config: Mapping[str, Any]) -> list[str]:
    faults = Faults()
    check_keys(config, faults)
    return faults.texts


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_documented_configs_have_known_keys_only(name: str) -> None:
    assert faults_of(EXAMPLES[name]) == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"zero_optimisation": {}},
            "zero_optimisation: DeepSpeed has no such key. Did you mean 'zero_optimization'",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"pin_memry": True}}},
            "zero_optimization.offload_optimizer.pin_memry: DeepSpeed has no such key in"
            " zero_optimization.offload_optimizer. Did you mean 'pin_memory'?",
        ),
        (
            {"overlap_comm": True},
            "overlap_comm: DeepSpeed has no such key. Did you mean 'zero_optimization.overlap_comm'?",
        ),
        (
            {"amp": {"enabled": False}},
            "amp: DeepSpeed has removed this key. NVIDIA Apex AMP integration has been removed. Use DeepSpeed 'fp16',",
        ),
        ({"fp16": True}, "fp16=True: expected a section with keys such as"),
        (
            {"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}},
            "zero_optimization.prefetch_bucket_size=1 and zero_optimization.stage3_prefetch_bucket_size=2: expected"
            " one of the two",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}},
            "optimizer.params.learning_rate: DeepSpeed's Adam has no such parameter. It takes adam_w_mode,",
        ),
        (
            {"optimizer": {"type": "AdanW", "params": {}}},
            "optimizer.type='AdanW': expected one of Adagrad, Adam, AdamW, Lamb, Lion, MuAdam, MuAdamW, Muon, MuSGD,"
            " or a class of torch.optim. Did you mean 'AdamW'",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 10}}},
            "scheduler.params.warmup_steps: DeepSpeed's WarmupLR has no such parameter. Did you mean 'warmup_",
        ),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_what_deepspeed_does_not_know(config: dict[str, Any], expected: str) -> None:
    (fault,) = faults_of(config)
    assert fault.startswith(expected)


def test_every_fault_is_found_in_one_go() -> None:
    config = {"fp61": {}, "zero_optimization": {"stge": 2, "offload_param": {"devise": "cpu"}}, "nebula": {}}
    assert [fault.partition(":")[0] for fault in faults_of(config)] == [
        "fp61",
        "zero_optimization.stge",
        "zero_optimization.offload_param.devise",
        "nebula",
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"_comment": "why", "zero_optimization": {"_why": "less memory", "stage": 2}},
        {"optimizer": {"type": "SGD", "params": {"anything": 1}}},
        {"scheduler": {"type": "StepLR", "params": {"anything": 1}}},
        {"optimizer": {"type": "MuAdam", "params": {"anything": 1}}},
        {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}},
        {"zero_optimization": True},
        {"zero_optimization": {"offload_param": None}},
        {"datastates_ckpt": {"host_cache_size": 16}},
        {"tensor_parallel": {"partition_config": {"anything": 1}}},
        {"data_efficiency": {"data_routing": {"random_ltd": {"anything": 1}}}},
    ],
    ids=str,
)
def test_what_is_not_flagged(config: dict[str, Any]) -> None:
    assert faults_of(config) == []
