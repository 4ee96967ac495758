"""What cannot be done is refused by name before any rank starts, or replaced, each replacement with a line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_lockstep._lightning import Precision
from lightning_lockstep.deepspeed.config_per_run import refuse_or_adapt
from lightning_lockstep.deepspeed.engine import resolve_deepspeed_precision
from lightning_lockstep.deepspeed.engine_trials import EngineTrials
from lightning_lockstep.deepspeed.importing import import_deepspeed, needed_builders
from lightning_lockstep.errors import ConfigurationError
from tests.models.deepspeed.example_configs import NVME, OFFLOADED, PARTLY_OFFLOADED, RATIO, optimizer, zero

OF_STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def without_float16_and_aio(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = import_deepspeed("cpu").get_accelerator()
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda: False)
    monkeypatch.setattr("lightning_lockstep.deepspeed.config_per_run._has_async_io", lambda: False)


@pytest.mark.parametrize(
    ("config", "builders"),
    [
        ({}, []),
        (optimizer("Adam"), ["FusedAdamBuilder"]),
        (optimizer("AdamW", torch_adam=True), []),
        (optimizer("Adam") | OFFLOADED, ["CPUAdamBuilder"]),
        (zero(offload_param=NVME), ["AsyncIOBuilder"]),
        (optimizer("Adam") | zero(offload_optimizer=NVME), ["CPUAdamBuilder", "AsyncIOBuilder"]),
    ],
    ids=str,
)
def test_the_ops_that_a_config_needs(config: dict[str, Any], builders: list[str]) -> None:
    assert needed_builders(config) == builders


#: Config, path of what cannot be done, what adapt writes instead, and whether on a CPU alone.
ROWS: list[tuple[dict[str, Any], str, Any, bool]] = [
    ({"fp16": {"enabled": True, "loss_scale": 0}}, "fp16.enabled", False, True),
    (zero(zero_quantized_weights=True), "zero_optimization.zero_quantized_weights", False, True),
    (zero(zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow", None, True),
    (PARTLY_OFFLOADED, RATIO, 1.0, True),
    (optimizer("Lamb"), "optimizer.type", None, True),
    (optimizer("Lion"), "optimizer.type", None, True),
    ({"aio": {"use_gds": True}}, "aio.use_gds", False, True),
    (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        "activation_checkpointing.cpu_checkpointing",
        False,
        True,
    ),
    (zero(mics_shard_size=2), "zero_optimization.mics_shard_size", None, False),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation", True, False),
    ({"compile": {"deepcompile": True}}, "compile.deepcompile", False, False),
    ({"pipeline": {"stages": 2}}, "pipeline", None, False),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size", None, False),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size", None, False),
    ({"checkpoint": {"writer": {"type": "FAST"}}}, "checkpoint.writer", None, False),
    (
        {"data_efficiency": {"data_sampling": {"enabled": True}}},
        "data_efficiency.data_sampling.enabled",
        False,
        False,
    ),
    ({"torch_autocast": {"enabled": True, "dtype": "half"}}, "torch_autocast.dtype", "bfloat16", False),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": NVME}},
        "zero_optimization.offload_optimizer.device",
        "none",
        False,
    ),
    (zero(offload_param=NVME), "zero_optimization.offload_param.device", "cpu", False),
]


@pytest.mark.parametrize(("config", "path", "instead", "on_cpu_alone"), ROWS, ids=lambda row: str(row)[:40])
def test_what_cannot_be_done(config: dict[str, Any], path: str, instead: Any, on_cpu_alone: bool) -> None:
    config = OF_STAGE_2 | config
    if on_cpu_alone:
        assert refuse_or_adapt(config, "cuda", False) == (config, [])
    for adapt in (False, True) if instead is None else (False,):
        with pytest.raises(ConfigurationError, match=rf"^{path}=") as caught:
            refuse_or_adapt(config, "cpu", adapt)
        assert ("adapt=True" in str(caught.value)) is (instead is not None)
    if instead is not None:
        adapted, (line,) = refuse_or_adapt(config, "cpu", True)
        assert line.startswith(f"{path}={instead!r}") and f" instead of {path}=" in line
        assert refuse_or_adapt(adapted, "cpu", False) == (adapted, [])


def test_a_replacement_may_set_another_key_and_leaves_the_given_config() -> None:
    given = OF_STAGE_2 | {"fp16": {"enabled": True, "loss_scale": 0}}
    adapted, (line,) = refuse_or_adapt(given, "cpu", True)
    assert adapted == OF_STAGE_2 | {"fp16": {"enabled": False, "loss_scale": 0}, "bf16": {"enabled": True}}
    assert line.startswith("fp16.enabled=False and bf16.enabled=True instead of fp16.enabled=True: this CPU")
    assert given["fp16"]["enabled"] is True


@pytest.mark.parametrize("config", [OFFLOADED, zero(overlap_comm=True), optimizer("Lion") | OFFLOADED])
def test_what_can_be_done(config: dict[str, Any]) -> None:
    config = OF_STAGE_2 | config
    assert refuse_or_adapt(config, "cpu", False) == (config, [])


@pytest.mark.parametrize(
    ("config", "requested", "device_type", "expected"),
    [
        ({}, "16-true", "cuda", "stage=0 with precision='16-true': expected stage 1"),
        ({"fp16": {"enabled": True}}, None, "cuda", "stage=0 with precision='16-mixed'"),
        ({"fp16": {"enabled": True, "loss_scale": 1}}, None, "cuda", ""),
        ({"bf16": {"enabled": True}}, None, "cpu", ""),
        ({}, "16-mixed", "cpu", "precision='16-mixed': expected '32-true', 'bf16-mixed' or 'bf16-true'"),
        ({}, "64-true", "cpu", "`Trainer(strategy='deepspeed', precision='64-true')` is not supported"),
    ],
    ids=str,
)
def test_float16_without_zero_or_on_such_a_cpu(
    config: dict[str, Any], requested: str | None, device_type: str, expected: str
) -> None:
    said = ""
    try:
        of_stage_0 = {"zero_optimization": {"stage": 0}, **config}
        resolve_deepspeed_precision(of_stage_0, Precision(), requested, device_type)
    except (ConfigurationError, ValueError) as error:
        said = str(error)
    assert said.startswith(expected) and bool(said) is bool(expected)


def test_a_search_does_not_try_zenflow():
    trials = EngineTrials(SimpleNamespace(model=None), zero(zenflow={"topk_ratio": 0.1}))
    assert trials.why_not_possible().startswith("zenflow of the config of DeepSpeed")
