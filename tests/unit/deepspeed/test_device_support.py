"""What DeepSpeed cannot do on this device is refused by name before any rank starts, or replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed import device_support
from lightning_lockstep.deepspeed.device_support import (
    limits,
    needed_ops,
    refuse_or_adapt,
)
from lightning_lockstep.errors import ConfigurationError
from tests.common.deepspeed.example_configs import NVME, OFFLOADED, PARTLY_OFFLOADED, RATIO, optimizer, zero


def nothing(op: str) -> bool:
    return False


def everything(op: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("config", "ops"),
    [
        ({}, []),
        (optimizer("Adam"), ["fused_adam"]),
        (optimizer("AdamW", torch_adam=True), []),
        (optimizer("Adam") | OFFLOADED, ["cpu_adam"]),
        (optimizer("AdamW", torch_adam=True) | OFFLOADED, []),
        (optimizer("Lamb"), ["fused_lamb"]),
        (zero(offload_param=NVME), ["async_io"]),
        (optimizer("Adam") | zero(offload_optimizer=NVME), ["cpu_adam", "async_io"]),
        (zero(zero_quantized_gradients=True), ["quantizer"]),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, []),
    ],
    ids=str,
)
def test_the_ops_that_a_config_needs(config: dict[str, Any], ops: list[str]) -> None:
    assert needed_ops(config, "cuda") == ops
    assert limits(config, "cuda", can_build_ops=everything) == []


@pytest.mark.parametrize(
    ("config", "path", "instead"),
    [
        (optimizer("Adam"), "optimizer.params.torch_adam", True),
        (optimizer("AdamW", torch_adam=False) | OFFLOADED, "optimizer.params.torch_adam", True),
        (optimizer("AdamW") | PARTLY_OFFLOADED, "optimizer.params.torch_adam", True),
        (optimizer("Adam", bias_correction=True), "optimizer.params.torch_adam", None),
        (optimizer("Lamb"), "optimizer.type", None),
        (zero(offload_param=NVME), "zero_optimization.offload_param.device", "cpu"),
        (zero(offload_optimizer=NVME), "zero_optimization.offload_optimizer.device", "cpu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_without_a_compiler(config: dict[str, Any], path: str, instead: Any, device_type: str) -> None:
    (limit,) = limits(config, device_type, can_build_ops=nothing)
    assert (limit.path, limit.instead) == (path, instead)
    if instead is not None:
        assert limits(refuse_or_adapt(config, [limit], True)[0], device_type, can_build_ops=nothing) == []


@pytest.mark.parametrize("has_float16", [True, False])
def test_float16_is_refused_on_a_cpu_without_it(monkeypatch: pytest.MonkeyPatch, has_float16: bool) -> None:
    monkeypatch.setattr(device_support, "cpu_has_float16", lambda: has_float16)
    config = {"fp16": {"enabled": True, "loss_scale": 0}}
    assert limits(config, "cuda") == []
    found = limits(config, "cpu")
    assert [limit.path for limit in found] == ([] if has_float16 else ["fp16.enabled"])
    adapted, lines = refuse_or_adapt(config, found, True)
    if not has_float16:
        with pytest.raises(ConfigurationError, match=r"writes fp16\.enabled=False and bf16\.enabled=True\."):
            refuse_or_adapt(config, found, False)
        assert adapted == {"fp16": {"enabled": False, "loss_scale": 0}, "bf16": {"enabled": True}}
        assert lines[0].startswith("fp16.enabled=False and bf16.enabled=True instead of fp16.enabled=True: ")


class DeepSpeedCPUAdam(torch.optim.SGD):
    """By its name the one of DeepSpeed, which is not made without its op."""


@pytest.mark.parametrize(
    ("config", "made", "is_limit"),
    [
        (OFFLOADED, torch.optim.AdamW, True),
        (OFFLOADED | {"zero_force_ds_cpu_optimizer": False}, torch.optim.AdamW, False),
        (OFFLOADED, DeepSpeedCPUAdam, False),
        (OFFLOADED, None, False),
        (zero(offload_param={"device": "cpu"}), torch.optim.AdamW, False),
    ],
    ids=str,
)
def test_an_optimizer_that_deepspeed_does_not_take_for_offloading(
    config: dict[str, Any], made: type | None, is_limit: bool
) -> None:
    found = limits(config, "cpu", can_build_ops=everything, client_optimizer=made)
    assert [limit.path for limit in found] == (["zero_force_ds_cpu_optimizer"] if is_limit else [])
    adapted, _ = refuse_or_adapt(config, found, True)
    assert adapted.get("zero_force_ds_cpu_optimizer") is (
        False if is_limit else config.get("zero_force_ds_cpu_optimizer")
    )


@pytest.mark.parametrize(
    ("config", "made", "why"),
    [
        (PARTLY_OFFLOADED, torch.optim.AdamW, "only with its own Adam for the CPU"),
        (PARTLY_OFFLOADED, DeepSpeedCPUAdam, ""),
        (PARTLY_OFFLOADED, None, ""),
        (OFFLOADED, torch.optim.AdamW, ""),
        (PARTLY_OFFLOADED | optimizer("AdamW", torch_adam=True), None, "only with its own Adam for the CPU"),
        (PARTLY_OFFLOADED | optimizer("SGD"), DeepSpeedCPUAdam, "only with its own Adam for the CPU"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            None,
            "in stage 3 only",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_part_is_offloaded_with_deepspeeds_own_adam_only(
    config: dict[str, Any], made: type | None, why: str, device_type: str
) -> None:
    config = {"zero_force_ds_cpu_optimizer": False} | config
    found = limits(config, device_type, can_build_ops=everything, client_optimizer=made)
    assert [limit.path for limit in found] == ([RATIO] if why else [])
    if why:
        with pytest.raises(ConfigurationError, match=rf"^{RATIO}=0\.3: DeepSpeed .* {why}\. Write 1\.0"):
            refuse_or_adapt(config, found, False)
        adapted, (line,) = refuse_or_adapt(config, found, True)
        assert line.startswith(f"{RATIO}=1.0 instead of {RATIO}=0.3: ")
        assert limits(adapted, device_type, can_build_ops=everything, client_optimizer=made) == []


def test_everything_is_refused_at_once_by_name_and_with_what_would_work() -> None:
    config = optimizer("Lamb") | zero(offload_param=NVME)
    with pytest.raises(ConfigurationError) as caught:
        refuse_or_adapt(config, limits(config, "cpu", can_build_ops=nothing), False)
    of_lamb, of_nvme = caught.value.faults
    assert of_lamb.startswith("optimizer.type='Lamb': DeepSpeed's Lamb needs its op fused_lamb")
    assert of_lamb.endswith("Choose another type, or let configure_optimizers return the optimizer.")
    assert of_nvme.startswith("zero_optimization.offload_param.device='nvme': DeepSpeed's op async_io")
    assert of_nvme.endswith("adapt=True of the strategy writes zero_optimization.offload_param.device='cpu'.")


def test_what_is_replaced_is_said_and_the_given_config_is_left_alone() -> None:
    config = optimizer("Adam") | zero(offload_param=NVME)
    adapted, lines = refuse_or_adapt(config, limits(config, "cpu", can_build_ops=nothing), True)
    assert adapted["optimizer"]["params"] == {"lr": 0.1, "torch_adam": True}
    assert adapted["zero_optimization"]["offload_param"] == {"device": "cpu", "nvme_path": "/nvme"}
    assert config == optimizer("Adam") | zero(offload_param=NVME)
    assert [line.partition(":")[0] for line in lines] == [
        "optimizer.params.torch_adam=True instead of optimizer.params.torch_adam=False",
        "zero_optimization.offload_param.device='cpu' instead of zero_optimization.offload_param.device='nvme'",
    ]
    assert limits(adapted, "cpu", can_build_ops=nothing) == []


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (zero(zero_quantized_weights=True), ["zero_optimization.zero_quantized_weights"]),
        (
            zero(zero_quantized_nontrainable_weights=True),
            ["zero_optimization.zero_quantized_nontrainable_weights"],
        ),
        (zero(zero_quantized_gradients=True), ["zero_optimization.zero_quantized_gradients"]),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, []),
        (
            zero(offload_optimizer={"device": "cpu", "super_offload": True}),
            ["zero_optimization.offload_optimizer.super_offload"],
        ),
        ({"aio": {"use_gds": True}}, ["aio.use_gds"]),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            ["activation_checkpointing.cpu_checkpointing"],
        ),
    ],
    ids=str,
)
def test_what_only_cuda_has(config: dict[str, Any], paths: list[str]) -> None:
    assert limits(config, "cuda") == []
    found = limits(config, "cpu")
    assert [limit.path for limit in found] == paths
    assert limits(refuse_or_adapt(config, found, True)[0], "cpu") == []


@pytest.mark.parametrize(
    ("config", "path", "instead"),
    [
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer", None),
        (
            zero() | {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            "torch_autocast.dtype",
            "bfloat16",
        ),
        (
            {"activation_checkpointing": {"contiguous_memory_optimization": True}},
            "activation_checkpointing.contiguous_memory_optimization",
            False,
        ),
        ({"compile": {"deepcompile": True, "double_buffer": True}}, "compile.deepcompile", False),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation", True),
        (
            {"data_efficiency": {"data_sampling": {"enabled": True}}},
            "data_efficiency.data_sampling.enabled",
            False,
        ),
        ({"pipeline": {"stages": 2}}, "pipeline", None),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size", None),
        ({"sequence_parallel_size": 2, "data_parallel_size": 1}, "sequence_parallel_size", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_no_device_can_do(config: dict[str, Any], path: str, instead: Any, device_type: str) -> None:
    (limit,) = limits(config, device_type)
    assert (limit.path, limit.instead) == (path, instead)
    with pytest.raises(ConfigurationError, match=rf"^{path}="):
        refuse_or_adapt(config, [limit], adapt=False)
    if instead is not None:
        adapted, (line,) = refuse_or_adapt(config, [limit], adapt=True)
        assert limits(adapted, device_type) == []
        assert line.startswith(f"{path}={instead!r} instead of {path}=")


def test_what_only_looks_like_it_is_accepted() -> None:
    for config in (
        {"checkpoint": {"tag_validation": "Fail"}},
        zero() | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        zero() | {"torch_autocast": {"enabled": False, "dtype": "float16"}},
        {"zero_optimization": {"stage": 0}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
        {"managed_gradient_accumulation": True, "pipeline": {}, "sequence_parallel_size": 1},
        {"tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": False}},
    ):
        assert limits(config, "cpu") == [], config
