"""The config and the Trainer: contradictions are faults, and what is open is filled in."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_lockstep._doors.lightning import Precision
from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed import precision as precision_module
from lightning_lockstep.deepspeed.config import with_named_options
from lightning_lockstep.deepspeed.config_checks import TrainerValues, check_against_trainer, precision_of
from lightning_lockstep.deepspeed.config_completion import completed
from lightning_lockstep.deepspeed.precision import resolve_deepspeed_precision
from lightning_lockstep.errors import ConfigurationError
from tests.common.deepspeed.example_configs import EXAMPLES, OF_TRANSFORMERS

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def faults_of(config: dict[str, Any], **values: Any) -> list[str]:
    faults = Faults()
    check_against_trainer({"zero_optimization": {"stage": 2}} | config, TrainerValues(**values), faults)
    return faults.texts


def full(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    return completed(config, TrainerValues(**values))


def refused(config: dict[str, Any], **values: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        full(config, **values)
    return caught.value.faults


@pytest.mark.parametrize(
    ("config", "values", "expected"),
    [
        (
            {"fp16": {"enabled": True}},
            {"precision": "bf16-mixed"},
            "fp16.enabled=True in the config and precision='bf16-mixed' of the Trainer: expected the same in both."
            " Set fp16.enabled to 'auto'",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            {},
            "fp16.enabled=True and bf16.enabled=True: expected at most one of the two",
        ),
        ({}, {"precision": "64-true"}, "precision='64-true': expected one of '32-true', '16-mixed'"),
        (
            {"torch_autocast": {"enabled": True}},
            {"precision": "bf16-mixed"},
            "torch_autocast.enabled=True in the config and precision='bf16-mixed' of the Trainer",
        ),
        (
            {"gradient_accumulation_steps": 4},
            {"accumulate_grad_batches": 2},
            "gradient_accumulation_steps=4 in the config and accumulate_grad_batches=2 of the Trainer",
        ),
        (
            {"gradient_clipping": 1.0},
            {"gradient_clip_val": 0.5},
            "gradient_clipping=1.0 in the config and gradient_clip_val=0.5 of the Trainer",
        ),
        (
            {},
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "gradient_clip_algorithm='value': expected 'norm' or None",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            {"batch_size": 8},
            "train_micro_batch_size_per_gpu=4 in the config and batch_size=8 of the training loader",
        ),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            {"world_size": 2},
            "train_batch_size=32: expected 16, which is train_micro_batch_size_per_gpu=4 x"
            " gradient_accumulation_steps=2 x 2 ranks",
        ),
        (
            {"train_batch_size": 32},
            {"world_size": 2, "batch_size": 5},
            "train_batch_size=32: expected a multiple of 10, which is train_micro_batch_size_per_gpu=5 x 2 ranks.",
        ),
    ],
    ids=str,
)
def test_a_contradiction_shows_both_values(
    config: dict[str, Any], values: dict[str, Any], expected: str
) -> None:
    (fault,) = faults_of(config, **values)
    assert fault.startswith(expected)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (
            {},
            {
                "precision": "16-mixed",
                "gradient_clip_val": 1.0,
                "accumulate_grad_batches": 4,
                "world_size": 2,
            },
        ),
        ({"zero_optimization": {"stage": 0}, "fp16": {"enabled": True, "loss_scale": 0}}, {}),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, {"precision": "16-true"}),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {"precision": "bf16-mixed"}),
        ({"torch_autocast": {"enabled": True}}, {"precision": "32-true"}),
        (
            {
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
            },
            {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0, "batch_size": 3, "world_size": 2},
        ),
        ({"train_batch_size": 24}, {"accumulate_grad_batches": 4, "batch_size": 3, "world_size": 2}),
        ({"train_batch_size": 32}, {"world_size": 2, "batch_size": 4}),
    ],
    ids=str,
)
def test_what_does_not_contradict(config: dict[str, Any], values: dict[str, Any]) -> None:
    assert faults_of(config, **values) == []


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, None),
        ({"fp16": {"enabled": True}}, "16-mixed"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16-mixed"),
        ({"bfloat16": {"enabled": True}}, "bf16-mixed"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, None),
    ],
    ids=str,
)
def test_the_precision_that_a_config_asks_for(config: dict[str, Any], precision: str | None) -> None:
    assert precision_of(config) == precision


def refused_precision(config: dict[str, Any], requested: str | None = None) -> str:
    try:
        resolve_deepspeed_precision(config, Precision(), requested, "cpu")
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("config", "requested", "expected"),
    [
        (
            {"zero_optimization": {"stage": 0}},
            "16-true",
            "stage=0 with precision='16-true': expected stage 1",
        ),
        (
            {"zero_optimization": False, "fp16": {"enabled": True, "loss_scale": 0}},
            None,
            "stage=0 with precision='16-mixed': expected stage 1, 2 or 3, as without ZeRO DeepSpeed divides",
        ),
        ({"zero_optimization": {"stage": 0}, "fp16": {"enabled": True, "loss_scale": 1}}, None, ""),
        ({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}, None, ""),
        ({"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}, None, ""),
    ],
    ids=str,
)
def test_float16_without_zero_is_refused(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], requested: str | None, expected: str
) -> None:
    monkeypatch.setattr(precision_module, "cpu_has_float16", lambda: True)
    said = refused_precision(config, requested)
    assert said.startswith(expected) and bool(said) is bool(expected)


def test_a_cpu_without_float16_is_told_of_no_setting_of_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "cpu_has_float16", lambda: False)
    said = refused_precision({"zero_optimization": {"stage": 0}}, "16-mixed")
    assert said.startswith("precision='16-mixed': expected one that DeepSpeed supports on this CPU: 32-true")
    assert said.endswith(
        "This CPU has no arithmetic in float16 that torch uses; bfloat16 works on every CPU."
    )


def test_what_deepspeed_would_choose_otherwise_is_what_the_trainer_does() -> None:
    config = full({"zero_optimization": {"stage": 2}})
    assert config.pop("steps_per_print") > 10**9
    assert config == {
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
    }


def test_the_trainers_values_are_written_down() -> None:
    config = full(
        {},
        accumulate_grad_batches=4,
        gradient_clip_val=0.5,
        batch_size=3,
        precision="bf16-true",
        world_size=2,
    )
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["bf16"] == {"enabled": True} and "fp16" not in config


@pytest.mark.parametrize(
    ("precision", "fp16", "bf16"),
    [
        ("16-mixed", True, False),
        ("16-true", True, False),
        ("bf16-mixed", False, True),
        ("bf16-true", False, True),
        ("32-true", False, False),
        (None, False, False),
    ],
)
def test_open_precisions_are_switched_by_the_trainer(precision: str | None, fp16: bool, bf16: bool) -> None:
    config = full({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, precision=precision)
    assert (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (fp16, bf16)


@pytest.mark.parametrize(
    (
        "config",
        "values",
        "sizes",
    ),  # train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps
    [
        ({"train_batch_size": 32}, {"world_size": 2, "batch_size": 4}, (32, 4, 4)),
        ({"train_batch_size": 32}, {"world_size": 2}, (32, 16, 1)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, {"world_size": 2}, (32, 4, 4)),
        ({"train_batch_size": 32}, {}, (32, None, None)),
        ({"train_batch_size": 32}, {"batch_size": 4}, (32, 4, None)),
        ({"train_batch_size": "auto"}, {"world_size": 2, "batch_size": 4}, (None, 4, 1)),
    ],
    ids=str,
)
def test_the_sizes_that_follow_from_the_whole_batch(
    config: dict[str, Any], values: dict[str, Any], sizes: tuple[int | None, ...]
) -> None:
    config = full(config, **values)
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert tuple(config.get(key) for key in keys) == sizes


def test_open_settings_of_optimizer_and_scheduler_are_filled() -> None:
    config = full(OF_TRANSFORMERS["accelerate-zero-3"], optimizer_defaults=ADAMW, total_steps=500)
    assert config["optimizer"]["params"] == {
        "lr": 3e-4,
        "weight_decay": 0.1,
        "torch_adam": True,
        "adam_w_mode": True,
    }
    assert config["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 3e-4,
        "warmup_num_steps": 1,
        "total_num_steps": 500,
    }


def test_buckets_follow_from_the_width_of_the_model() -> None:
    zero = full(OF_TRANSFORMERS["transformers-zero-3"], optimizer_defaults=ADAMW, hidden_size=1024)[
        "zero_optimization"
    ]
    assert zero["reduce_bucket_size"] == 1024**2
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 1024**2)
    assert zero["stage3_param_persistence_threshold"] == 10240


@pytest.mark.parametrize(
    ("config", "values", "expected"),
    [
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
            {"optimizer_defaults": {"momentum": 0.9}},
            "optimizer.params.lr='auto': configure_optimizers returns no optimizer that has this setting. Write a"
            " number.",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            {"total_steps": -1},
            "scheduler.params.total_num_steps='auto': the number of steps is not known. Write a number, or give",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
            {},
            "scheduler.params.warmup_max_lr='auto': configure_optimizers returns no optimizer",
        ),
        (
            {"wall_clock_breakdown": "auto"},
            {},
            "wall_clock_breakdown='auto': its value cannot be derived from the Trainer,",
        ),
    ],
    ids=str,
)
def test_an_auto_that_nobody_can_fill_is_refused(
    config: dict[str, Any], values: dict[str, Any], expected: str
) -> None:
    (fault,) = refused(config, **values)
    assert fault.startswith(expected)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [value]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_deepspeed_accepts_what_is_complete(name: str, precision: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    given = with_named_options(
        EXAMPLES[name], stage=None, offload_optimizer=None, offload_param=None, nvme_path=None
    )
    asked = precision_of(given)
    values = TrainerValues(
        precision=asked or precision, world_size=1, total_steps=100, optimizer_defaults=ADAMW, hidden_size=64
    )
    faults = Faults()
    check_against_trainer(given, values, faults)
    assert faults.texts == []
    config = completed(given, values)
    assert "auto" not in leaves(config)
    read = DeepSpeedConfig(config)
    assert (
        read.gradient_clipping == given.get("gradient_clipping", 0.0) or given["gradient_clipping"] == "auto"
    )
    assert read.float16_config.enabled is (values.precision == "16-mixed")
    assert read.bfloat16_config.enabled is (values.precision == "bf16-mixed")
    assert read.zero_optimization_stage == given["zero_optimization"]["stage"]
