"""What DeepSpeed cannot do on this device is refused by name before any rank starts, or replaced."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed import device_support
from lightning_lockstep.deepspeed.config_checks import TrainerValues
from lightning_lockstep.deepspeed.config_completion import completed
from lightning_lockstep.deepspeed.device_support import (
    Limit,
    can_build_op,
    limits,
    needed_ops,
    refuse_or_adapt,
)
from lightning_lockstep.deepspeed.engine import adopt_process_group
from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.errors import ConfigurationError
from tests.helpers import run_ranks

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def nothing(op: str) -> bool:
    return False


def everything(op: str) -> bool:
    return True


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}


OFFLOADED = zero(offload_optimizer={"device": "cpu"})
PARTLY_OFFLOADED = zero(offload_optimizer={"device": "cpu", "ratio": 0.3})
RATIO = "zero_optimization.offload_optimizer.ratio"
NVME = {"device": "nvme", "nvme_path": "/nvme"}


@pytest.mark.parametrize(
    ("config", "ops"),
    [
        ({}, []),
        (optimizer("Adam"), ["fused_adam"]),
        (optimizer("AdamW", torch_adam=True), []),
        (optimizer("Adam") | OFFLOADED, ["cpu_adam"]),
        (optimizer("AdamW", torch_adam=True) | OFFLOADED, []),
        (optimizer("Lion") | OFFLOADED, ["cpu_lion"]),
        (optimizer("Lion"), ["fused_lion"]),
        (optimizer("Lamb"), ["fused_lamb"]),
        (optimizer("Adagrad"), []),
        (optimizer("Adagrad") | OFFLOADED, ["cpu_adagrad"]),
        (optimizer("SGD"), []),
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


def test_evaluations_need_no_op_of_the_optimizer() -> None:
    assert needed_ops(optimizer("Adam") | zero(offload_optimizer=NVME), "cuda", fits=False) == []
    assert needed_ops(optimizer("Adam") | zero(offload_param=NVME), "cpu", fits=False) == ["async_io"]


@pytest.mark.parametrize(
    ("config", "path", "instead"),
    [
        (optimizer("Adam"), "optimizer.params.torch_adam", True),
        (optimizer("AdamW", torch_adam=False) | OFFLOADED, "optimizer.params.torch_adam", True),
        (optimizer("AdamW") | PARTLY_OFFLOADED, "optimizer.params.torch_adam", True),
        (optimizer("Adam", bias_correction=True), "optimizer.params.torch_adam", None),
        (optimizer("Lion"), "optimizer.type", None),
        (optimizer("Lamb"), "optimizer.type", None),
        (optimizer("Adagrad") | OFFLOADED, "optimizer.type", None),
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


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_optimizers_of_pytorch_need_no_op(kind: str) -> None:
    assert limits(optimizer(kind), "cpu", can_build_ops=nothing) == []


def test_deepspeed_is_not_asked_where_no_op_is_needed() -> None:
    def asked(op: str) -> bool:
        raise AssertionError(op)

    config = {"bf16": {"enabled": True}, **optimizer("AdamW", torch_adam=True), **zero()}
    assert limits(config, "cpu", can_build_ops=asked) == []


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
        (OFFLOADED | {"zero_force_ds_cpu_optimizer": True}, torch.optim.AdamW, True),
        (OFFLOADED | {"zero_force_ds_cpu_optimizer": False}, torch.optim.AdamW, False),
        (OFFLOADED, DeepSpeedCPUAdam, False),
        (OFFLOADED, None, False),
        (OFFLOADED | optimizer("SGD"), torch.optim.AdamW, False),
        (zero(), torch.optim.AdamW, False),
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
        (zero(offload_optimizer={"device": "cpu", "ratio": 1}), torch.optim.AdamW, ""),
        (zero(offload_optimizer={"device": "cpu", "ratio": "auto"}), torch.optim.AdamW, ""),
        (zero(offload_optimizer={"device": "none", "ratio": 0.3}), torch.optim.AdamW, ""),
        (
            zero(offload_optimizer=NVME | {"ratio": 0.3}),
            torch.optim.AdamW,
            "only with its own Adam for the CPU",
        ),
        (PARTLY_OFFLOADED | optimizer("AdamW"), None, ""),
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


def test_with_adapt_only_what_has_no_replacement_is_refused() -> None:
    config = optimizer("Lamb") | zero(offload_param=NVME)
    with pytest.raises(ConfigurationError) as caught:
        refuse_or_adapt(config, limits(config, "cpu", can_build_ops=nothing), True)
    (fault,) = caught.value.faults
    assert fault.startswith("optimizer.type='Lamb'")


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


def test_nothing_to_adapt_changes_nothing() -> None:
    assert refuse_or_adapt(zero(), [], False) == refuse_or_adapt(zero(), [], True) == (zero(), [])


def test_a_section_is_made_for_a_replacement_in_it() -> None:
    limit = Limit("bf16.enabled", None, "why", True, "advice")
    assert refuse_or_adapt({}, [limit], True)[0] == {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (zero(zero_quantized_weights=True), ["zero_optimization.zero_quantized_weights"]),
        (
            zero(zero_quantized_nontrainable_weights=True),
            ["zero_optimization.zero_quantized_nontrainable_weights"],
        ),
        (zero(zero_quantized_gradients=True), ["zero_optimization.zero_quantized_gradients"]),
        ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, []),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, []),
        (zero(zero_quantized_weights=False), []),
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


def test_zenflow_on_a_cpu_has_no_replacement() -> None:
    assert limits(zero(zenflow={"topk_ratio": 0.1}), "cuda") == limits(zero(zenflow=None), "cpu") == []
    (limit,) = limits(zero(zenflow={"topk_ratio": 0.1}), "cpu")
    with pytest.raises(
        ConfigurationError, match=r"zero_optimization\.zenflow=\{'topk_ratio': 0\.1\}: ZenFlow is"
    ):
        refuse_or_adapt({}, [limit], True)


# -- the same, asked of DeepSpeed --------------------------------------------------------------------------

#: What the table of limits says of a CPU, in configs for two ranks.
REFUSED = {
    "quantized weights": zero(zero_quantized_weights=True),
    "quantized frozen weights": zero(zero_quantized_nontrainable_weights=True),
    "quantized gradients": zero(zero_quantized_gradients=True),
    "GPUDirect Storage": zero() | {"aio": {"use_gds": True}},
    "client optimizer": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "client optimizer, offloaded in part": PARTLY_OFFLOADED | {"zero_force_ds_cpu_optimizer": False},
    "offloaded in part": PARTLY_OFFLOADED | optimizer("AdamW", torch_adam=True),
    "offloaded in part in stage 2": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
        "zero_force_ds_cpu_optimizer": False,
    },
    "SuperOffload": zero(offload_optimizer={"device": "cpu", "super_offload": True})
    | optimizer("AdamW", torch_adam=True),
    "Lamb": optimizer("Lamb") | zero(),
    "Lion": optimizer("Lion") | zero(),
}
ACCEPTED = {
    "overlapping": zero(overlap_comm=True),
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
    adopt_process_group(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        timeout=timedelta(seconds=60),
    )
    return {name: try_one(deepspeed, config) for name, config in configs.items()}


def try_one(deepspeed: Any, config: dict[str, Any]) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    made = None if "optimizer" in config else torch.optim.AdamW(model.parameters())
    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=made,
            model_parameters=model.parameters() if made is None else None,
            config=completed(config, TrainerValues(batch_size=2)),
        )
        for _ in range(2):
            batch = torch.ones(2, 16, dtype=torch.bfloat16 if engine.bfloat16_enabled() else torch.float32)
            engine.backward(engine(batch).float().mean())
            engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@needs_deepspeed
def test_deepspeed_refuses_what_is_listed_and_nothing_else() -> None:
    configs = REFUSED | ACCEPTED
    found = {
        name: limits(config, "cpu", client_optimizer=torch.optim.AdamW) for name, config in configs.items()
    }
    assert {name for name, limit in found.items() if limit} == set(REFUSED)
    adapted = {
        f"{name}, adapted": refuse_or_adapt(config, found[name], True)[0]
        for name, config in REFUSED.items()
        if all(limit.instead is not None for limit in found[name])
    }
    assert len(adapted) == 9
    said, of_the_other = run_ranks(2, try_on_a_rank, {**configs, **adapted}, timeout=300)
    assert {name for name, text in said.items() if text} == set(REFUSED), said
    assert {name for name, text in of_the_other.items() if text} == set(REFUSED), of_the_other


@needs_deepspeed
@pytest.mark.parametrize("op", ["fused_lamb", "fused_lion"])
def test_ops_that_only_cuda_has_cannot_be_built_for_a_cpu(op: str) -> None:
    assert run_ranks(1, can_build_op, op, "cpu", backend=None) == [False]


@needs_deepspeed
@pytest.mark.parametrize("op", ["fused_adam", "cpu_adam"])
def test_without_a_compiler_no_op_can_be_built(op: str) -> None:
    env = {"CXX": "no-such-compiler"}
    assert run_ranks(1, can_build_op, op, "cpu", backend=None, env=env) == [False]
