"""Every key that DeepSpeed reads is known, no other, and a misspelt one is a fault that names the right one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import reduce
from typing import Any

import pytest

from lightning_lockstep._doors.deepspeed_internals import config_models, let_read, removed_keys
from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed import known_keys as known_keys_module
from lightning_lockstep.deepspeed.known_keys import check_keys, known_keys
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
            {"zero_optimization": {"reduce_bucket_sise": 1}},
            "zero_optimization.reduce_bucket_sise: DeepSpeed has no such key in zero_optimization. Did you mean"
            " 'reduce_bucket_size'",
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
            {"wandb": {"qqqq": 1}},
            "wandb.qqqq: DeepSpeed has no such key in wandb. It takes enabled, group, project, team.",
        ),
        (
            {"amp": {"enabled": False}},
            "amp: DeepSpeed has removed this key. NVIDIA Apex AMP integration has been removed. Use DeepSpeed 'fp16',",
        ),
        (
            {"zero_optimization": {"mics_shard_size": 2}},
            "zero_optimization.mics_shard_size: DeepSpeed has removed this key. MiCS ZeRO-3 sharding has been removed;",
        ),
        ({"fp16": True}, "fp16=True: expected a section with keys such as"),
        ({3: 1}, "3: DeepSpeed has no such key."),
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
            {"optimizer": {"type": "adamw", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm=1.0: DeepSpeed does not clip gradients in the optimizer. Write"
            " gradient_clipping",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "bias_correction": True}}},
            "optimizer.params.bias_correction: DeepSpeed's Adam has no such parameter.",
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
        (
            {"scheduler": {"type": "WarmupCosinLR", "params": {}}},
            "scheduler.type='WarmupCosinLR': expected one of LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR,"
            " WarmupLR, or a class of torch.optim.lr_scheduler. Did you mean 'WarmupCosineLR'",
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


# -- the keys and the installed release --------------------------------------------------------------------


def places(known: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the way to each key, and whether it is one of a section."""
    for key, inner in known.items():
        yield (*path, key), inner is not None
        if inner is not None:
            yield from places(inner, (*path, key))


def test_sections_of_every_kind_are_known_down_to_the_last_level() -> None:
    known = {".".join(path) for path, _ in places(known_keys())}
    assert len(known) > 300
    assert known >= {
        "autotuning.model_info.num_params",
        "bfloat16.enabled",
        "checkpoint.writer.io_buffer_size",
        "data_efficiency.data_sampling.dynamic_batching.max_tokens",
        "expert_parallel.autoep_size",
        "gradient_clipping",
        "optimizer.params",
        "tensor_parallel.tp.tp_size",
        "timers.throughput.synchronized",
        "zero_optimization.leaf_module.classes",
        "zero_optimization.max_live_parameters",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.zenflow.topk_ratio",
    }


def test_no_section_counts_as_a_value() -> None:
    """DeepSpeed looks for nothing in a section that takes the place of a value."""
    models = [tuple(path.split(".")) for path in config_models()]
    looked_into = set()
    for path, is_section in places(known_keys()):
        if is_section or any(path[: len(model)] == model for model in models):
            continue
        config = holder = copy.deepcopy(dict(known_keys_module._SECTIONS))
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = {}
        asked: Any = known_keys_module._Asked(config)
        section = reduce(dict.__getitem__, path, asked)
        with suppress(Exception):  # it wants a value there
            let_read(asked)
        if section.known:
            looked_into.add(".".join(path))
    # Names are chosen freely in these.
    assert looked_into == {
        "optimizer.params",
        "data_efficiency.data_sampling.curriculum_learning",
        "data_efficiency.data_routing.random_ltd",
    }


def test_every_removed_key_is_refused() -> None:
    config: dict[str, Any] = {"zero_optimization": {}}
    for path in removed_keys():
        *outer, key = path.split(".")
        (config[outer[0]] if outer else config)[key] = {}
    said = faults_of(config)
    assert len(said) == len(removed_keys()) > 10
    assert all("DeepSpeed has removed this key." in fault for fault in said)


def test_deepspeeds_own_optimizers_are_known() -> None:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert {name.lower() for name in known_keys_module._OPTIMIZERS} == set(DEEPSPEED_OPTIMIZERS)
    of_halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
    more = {
        "adam_lr",
        "adam_w_mode",
        "foreach",
        "fp32_optimizer_states",
        "muon_lr",
        "per_head_muon",
        "torch_adam",
    }
    params = dict.fromkeys(of_halves | more, 1)
    assert faults_of({"optimizer": {"type": "Muon", "params": params}}) == []
    (fault,) = faults_of({"optimizer": {"type": "Muon", "params": {"qqqq": 1}}})
    assert fault.endswith(f"It takes {', '.join(sorted(of_halves | more))}.")


def test_optimizers_that_only_another_release_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.19.6 there is OneBitAdam."""
    config = {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 1}}}
    assert len(faults_of(config)) == 1
    monkeypatch.setattr("deepspeed.runtime.config.DEEPSPEED_OPTIMIZERS", ["adam", "onebitadam"])
    assert faults_of(config) == []
