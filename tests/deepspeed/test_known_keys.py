"""Every key that DeepSpeed reads is known, no other, and a misspelt one is a fault that names the right one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed import known_keys
from lightning_lockstep.deepspeed.known_keys import (
    KNOWN,
    OPTIMIZER_PARAMS,
    OPTIMIZER_TYPES,
    REMOVED,
    SAME,
    SCHEDULER_PARAMS,
    TORCH_ADAM_PARAMS,
    check_keys,
)
from tests.deepspeed.example_configs import EXAMPLES


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
        ({"amp": {"enabled": False}}, "amp: DeepSpeed has removed this key. Write 'fp16' or 'bf16'"),
        (
            {"zero_optimization": {"mics_shard_size": 2}},
            "zero_optimization.mics_shard_size: DeepSpeed has removed this key. Use zero_hpz_partition_size.",
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


def test_keys_of_another_release_are_looked_for_in_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    # A name that the sources have and the tables do not stands for a key of that release.
    config = {"get_zero_config": 1, "zero_optimization": {"stge": 2}, "overlap_comm": True, "amp": {}}
    of_this, of_older, of_newer = [], [], []
    for version, names in (("0.19.8", of_this), ("0.17.0", of_older), ("0.25.1", of_newer)):
        monkeypatch.setattr(known_keys, "RELEASE", "0.19.8")
        monkeypatch.setattr("importlib.metadata.version", lambda package, version=version: version)
        names += [fault.partition(":")[0] for fault in faults_of(config)]
    assert of_this == ["get_zero_config", "zero_optimization.stge", "overlap_comm", "amp"]
    assert of_older == ["zero_optimization.stge", "overlap_comm"]
    assert of_newer == ["zero_optimization.stge", "overlap_comm", "amp"]


# -- the tables and the installed release ------------------------------------------------------------------


class Asked(dict[str, Any]):
    """A section of a config that notes which keys DeepSpeed looks for."""

    def __init__(self, content: Mapping[str, Any], path: str, notes: set[str]) -> None:
        super().__init__(content)
        self.path, self.notes = path, notes

    def get(self, key: str, default: Any = None) -> Any:
        self.notes.add(f"{self.path}{key}")
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.notes.add(f"{self.path}{key}")
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.notes.add(f"{self.path}{key}")
        return super().__contains__(key)

    def keys(self) -> Any:
        section = self

        class View:
            def __contains__(self, key: object) -> bool:
                return key in section

            def __iter__(self) -> Iterator[str]:
                return iter(section)

        return View()


def paths(known: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, inner in known.items():
        yield f"{path}{key}"
        if inner is not None:
            yield from paths(inner, f"{path}{key}.")


def asking(known: Mapping[str, Any], notes: set[str], path: str = "") -> Asked:
    """Return a config with every section and no value."""
    sections = {
        key: asking({} if f"{path}{key}" in models() else inner, notes, f"{path}{key}.")
        for key, inner in known.items()
        if inner is not None
    }
    return Asked(sections, path, notes)


def models() -> dict[str, Any]:
    """The sections that DeepSpeed reads with a model of its own, by path."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "comet": CometConfig,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "csv_monitor": CSVConfig,
        "fp16": DeepSpeedFP16Config,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "tensor_parallel.tensor_parallel": TPConfig,
        "tensor_parallel.tp": TPConfig,
        "tensorboard": TensorBoardConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "wandb": WandbConfig,
        "weight_quantization": WeightQuantConfig,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.zenflow": ZenFlowConfig,
    }


def fields(model: Any) -> set[str]:
    return {
        name for field, info in model.model_fields.items() for name in (field, info.alias) if name is not None
    }


def section_at(path: str) -> Mapping[str, Any]:
    known: Mapping[str, Any] = KNOWN
    for name in path.split("."):
        known = known[name]
    return known


def parameters(*functions: Any, without: tuple[str, ...] = ()) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters} - {
        "params",
        "model_params",
        "optimizer",
        *without,
    }


def test_the_sections_with_a_model_have_its_fields() -> None:
    pytest.importorskip("deepspeed")
    for path, model in models().items():
        assert set(section_at(path)) == fields(model), path
        twice = {(name, info.alias) for name, info in model.model_fields.items() if info.alias is not None}
        assert set(SAME.get(path, ())) == twice, path


def keys_asked_for() -> set[str]:
    from deepspeed.runtime.config import DeepSpeedConfig

    notes: set[str] = set()
    config = asking(KNOWN, notes)
    config["train_batch_size"] = 1
    config["optimizer"]["type"] = "Adam"
    config["scheduler"]["type"] = "WarmupLR"
    config["expert_parallel"]["enabled"] = False
    notes.clear()
    DeepSpeedConfig(config)
    return notes


def test_every_key_that_deepspeed_looks_for_is_known() -> None:
    pytest.importorskip("deepspeed")
    asked = keys_asked_for()
    assert "zero_optimization" in asked and "checkpoint.writer.type" in asked
    assert asked - set(paths(KNOWN)) == set(REMOVED)


def test_every_key_that_is_known_is_looked_for() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import get_pipeline_config

    of_models = {f"{path}.{field}" for path in models() for field in section_at(path)}
    of_pipeline = {f"pipeline.{name}" for name in [*get_pipeline_config({}), "use_reentrant"]}
    read_elsewhere = {
        "allgather_size",  # with zero_optimization: true
        "bfloat16",  # without bf16
        "data_parallel_size",  # beside sequence_parallel_size
        "sequence_parallel_size",  # with a process group
        "data_efficiency.data_sampling.dynamic_batching.metrics_path",  # by the sampler
        "data_efficiency.data_sampling.dynamic_batching.max_tokens",  # where it is enabled
    }
    unread = set(paths(KNOWN)) - keys_asked_for() - of_models - of_pipeline
    assert unread == read_elsewhere


def test_the_removed_keys_are_deepspeeds() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    of_zero = {f"zero_optimization.{name}" for name in _REMOVED_ZERO_CONFIG_KEYS}
    assert set(REMOVED) == set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) | of_zero


def test_the_parameters_of_deepspeeds_optimizers() -> None:
    pytest.importorskip("deepspeed")
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert set(OPTIMIZER_PARAMS) == {name.lower() for name in OPTIMIZER_TYPES} == set(DEEPSPEED_OPTIMIZERS)
    of_engine = {"adam_w_mode", "fp32_optimizer_states", "torch_adam"}
    of_adam = parameters(FusedAdam, DeepSpeedCPUAdam, without=("adamw_mode",)) | of_engine
    assert OPTIMIZER_PARAMS["adam"] == OPTIMIZER_PARAMS["adamw"] == of_adam
    assert of_engine | parameters(torch.optim.AdamW, torch.optim.Adam) - {"decoupled_weight_decay"} == (
        TORCH_ADAM_PARAMS
    )
    assert OPTIMIZER_PARAMS["lamb"] == parameters(FusedLamb, without=("max_grad_norm",))
    assert OPTIMIZER_PARAMS["lion"] == parameters(FusedLion, DeepSpeedCPULion)
    assert OPTIMIZER_PARAMS["adagrad"] == parameters(torch.optim.Adagrad, DeepSpeedCPUAdagrad)
    of_halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
    assert OPTIMIZER_PARAMS["muon"] == of_halves | of_engine | {
        "adam_lr",
        "foreach",
        "muon_lr",
        "per_head_muon",
    }


def test_the_parameters_of_deepspeeds_schedulers() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import lr_schedules

    assert set(SCHEDULER_PARAMS) == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, known in SCHEDULER_PARAMS.items():
        assert known == parameters(getattr(lr_schedules, name)), name


def test_a_key_that_is_left_out_of_the_tables_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.delitem(KNOWN, "gradient_clipping")  # type: ignore[arg-type]
    assert "gradient_clipping" in keys_asked_for() - set(paths(KNOWN))
