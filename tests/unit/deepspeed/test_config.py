"""The configuration as it is read, joined with options, completed from the Trainer and parsed by DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_lockstep.deepspeed.config_parsing import (
    TrainerValues,
    completed,
    read_config,
    with_named_options,
)
from lightning_lockstep.errors import ConfigurationError

ZERO = {"zero_optimization": {"stage": 2}}


def joined(config: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    named = {"stage": None, "offload_optimizer": None, "offload_param": None, "nvme_path": None}
    return with_named_options(read_config(config), **(named | options))


def full(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    return completed(config, TrainerValues(**values), world_size=2)


def faults_of(work: Any, *args: Any, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        work(*args, **options)
    return caught.value.faults


# -- read ------------------------------------------------------------------------------------------------


def test_a_config_is_copied_in_plain_containers_without_nulls() -> None:
    group = object()
    given = {
        "optimizer": {"params": {"betas": (0.9, 0.99), "foreach": None}},
        "tensor_parallel": {"tp": {"tp_group": group}},
        "fp16": None,
        "bfloat16": {"enabled": True},
    }
    config = read_config(given)
    assert config == {
        "optimizer": {"params": {"betas": [0.9, 0.99], "foreach": None}},
        "tensor_parallel": {"tp": {"tp_group": group}},
        "bf16": {"enabled": True},
    }
    config["optimizer"]["params"]["betas"].append(0)
    assert given["optimizer"]["params"]["betas"] == (0.9, 0.99)  # type: ignore[index, call-overload]
    of_hydra = OmegaConf.create({"n": 3, "zero_optimization": {"stage": "${n}", "sizes": [1, "${n}"]}})
    zero = read_config(of_hydra)["zero_optimization"]
    assert zero == {"stage": 3, "sizes": [1, 3]} and type(zero) is dict and type(zero["sizes"]) is list


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  // which stage\n  "zero_optimization": {"stage": 2,},  # the last\n}', ""),
        ('{"zero_optimization": {"stage": 3},\n "bf16": }', "line 2 column"),
        ('{"bf16": {}, "bf16": {}}', "Duplicate keys in DeepSpeed config: ['bf16']"),
        ("[1]", "expected a mapping"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_is_read_as_deepspeed_reads_it(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    if not expected:
        assert read_config(path) == read_config(str(path)) == ZERO
        return
    assert expected in faults_of(read_config, path)[0]


# -- joined with options ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {}}, {"zero_optimization": {"stage": "auto"}}])
def test_the_stage_is_2_if_nobody_says_one(config: dict[str, Any]) -> None:
    assert joined(config) == ZERO
    assert joined(config, stage=3)["zero_optimization"]["stage"] == 3


def test_options_are_added_to_the_sections_that_are_there(tmp_path: Path) -> None:
    given = {"zero_optimization": {"stage": 3, "offload_optimizer": {"pin_memory": True, "device": "auto"}}}
    options = {"stage": 3, "offload_optimizer": "nvme", "offload_param": "cpu", "nvme_path": tmp_path}
    zero = joined(given, **options)["zero_optimization"]
    assert zero["offload_optimizer"] == {"pin_memory": True, "device": "nvme", "nvme_path": str(tmp_path)}
    assert zero["offload_param"] == {"device": "cpu"}


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            {"stage": 2, "offload_optimizer": "none"},
            (
                "zero_optimization.stage=3 in the config and stage=2 of the strategy: expected one of the two",
                "zero_optimization.offload_optimizer.device='cpu' in the config and offload_optimizer='none'",
            ),
        ),
        (
            {"stage": 3},
            {"offload_param": "nvme"},
            ("nvme_path=None: expected a folder, because offload_param",),
        ),
        ({}, {"nvme_path": "/nvme"}, ("nvme_path='/nvme': expected None, because neither",)),
        (2, {}, ("zero_optimization=2: expected a section",)),
    ],
)
def test_what_options_contradict(config: Any, options: dict[str, Any], expected: tuple[str, ...]) -> None:
    found = faults_of(joined, {"zero_optimization": config}, **options)
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected)), found


# -- parsed by DeepSpeed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "zero_optimisation": {},
                "fp61": {},
                "overlap_comm": True,
                "bf16": {"enbled": True},
                "zero_optimization": {
                    "stage": 2,
                    "overlap_com": True,
                    "offload_param": {"devise": 1, "pin": 2},
                },
            },
            (
                "zero_optimization.offload_param.devise=1: DeepSpeed has no such key in this section. Did you mean",
                "zero_optimization.offload_param.pin=2: DeepSpeed has no such key in this section.",
                "zero_optimization.overlap_com=True: DeepSpeed has no such key in this section. Did you mean 'overlap_",
                "bf16.enbled=True: DeepSpeed has no such key in this section. Did you mean 'enabled'",
                "zero_optimisation: DeepSpeed has no such key at the top level. Did you mean 'zero_optimization'?",
                "fp61: DeepSpeed has no such key at the top level. Did you mean 'fp16'",
                "overlap_comm: DeepSpeed has no such key at the top level. Did you mean 'zero_optimization.overlap_c",
            ),
        ),
        (
            {
                "activation_checkpointing": {"partition_activation": True},
                "aio": {"block_sise": 1},
                "optimizer": {"type": "Adam", "param": {}},
                "scheduler": {"typ": "WarmupLR"},
            },
            (
                "activation_checkpointing.partition_activation: DeepSpeed has no such key in this section. Did you",
                "aio.block_sise: DeepSpeed has no such key in this section. Did you mean 'block_size'?",
                "optimizer.param: DeepSpeed has no such key in this section. Did you mean 'params'?",
                "scheduler.typ: DeepSpeed has no such key in this section. Did you mean 'type'?",
            ),
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "gpu"}, "overlap": True}},
            (
                "zero_optimization.offload_param.device='gpu': DeepSpeed refuses it: Input should be 'none', 'cpu'",
                "zero_optimization.overlap=True: DeepSpeed has no such key",
            ),
        ),
        (
            {"elasticity": {}},
            ("config: DeepSpeed refuses it (DeepSpeedConfigError): Elastic training has been",),
        ),
        ({"fp16": True}, ("fp16=True: DeepSpeed refuses it (TypeError): ",)),
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 8,
                "gradient_accumulation_steps": 4,
                "gradient_cliping": 1.0,
            },
            (
                "config: DeepSpeed refuses it (AssertionError): Check batch related parameters. train_batch_size is not"
                " equal to micro_batch_per_gpu * gradient_acc_step * world_size 32 != 8 * 4 * 2",
                "gradient_cliping: DeepSpeed has no such key at the top level. Did you mean 'gradient_clipping'",
            ),
        ),
        ({"train_batch_size": 7}, ("config: DeepSpeed refuses it (AssertionError): Check batch related",)),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            ("config: DeepSpeed refuses it (AssertionError): bfloat16 and fp16 modes cannot be",),
        ),
        (
            {"gradient_accumulation_steps": "two"},
            ("gradient_accumulation_steps='two': expected a number, 1 or",),
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            ("config: DeepSpeed refuses it: Assertion failed, Partial offloading only supported for",),
        ),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_what_deepspeed_refuses_or_ignores(config: dict[str, Any], expected: tuple[str, ...]) -> None:
    found = faults_of(full, ZERO | config)
    assert len(found) == len(expected), found
    assert all(map(str.startswith, found, expected)), found


@pytest.mark.parametrize(
    "config",
    [
        {"_comment": "why"},
        {"optimizer": {"type": "SGD", "params": {"anything": 1}}},
        {"scheduler": {"type": "StepLR", "params": {"anything": 1}}},
        {"datastates_ckpt": {"host_cache_size": 16}},
        {"sequence_parallel_size": 1, "vocabulary_size": 64, "torch_autocast": {"enabled": False}},
        {"train_batch_size": "auto", "wall_clock_breakdown": "auto", "zero_optimization": {"stage": "auto"}},
    ],
    ids=str,
)
def test_what_is_not_flagged(config: dict[str, Any]) -> None:
    assert set(config) - set(full(ZERO | config)) <= {"train_batch_size", "wall_clock_breakdown"}


# -- completed from the Trainer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "values", "expected"),
    [
        (
            {"fp16": {"enabled": True}},
            {"precision": "bf16-mixed"},
            "fp16.enabled=True in the config and precision='bf16-mixed' of the Trainer: expected one of the two, or the"
            " same in both.",
        ),
        (
            {"torch_autocast": {"enabled": True}},
            {"precision": "bf16-mixed"},
            "torch_autocast.enabled=True in the config and precision='bf16-mixed'",
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
            {"train_micro_batch_size_per_gpu": 4},
            {"batch_size": 8},
            "train_micro_batch_size_per_gpu=4 in the config and batch_size=8 of the training loader",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, {"precision": "16-true"}, ""),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {"precision": "bf16-mixed"}, ""),
        ({"torch_autocast": {"enabled": True}}, {"precision": "32-true"}, ""),
        ({"gradient_clipping": "auto"}, {"gradient_clip_val": 1.0, "batch_size": 3}, ""),
    ],
    ids=str,
)
def test_a_contradiction_shows_both_values(config: dict[str, Any], values: dict[str, Any], expected: str) -> None:
    found = faults_of(full, ZERO | config, **values) if expected else full(ZERO | config, **values) and ()
    assert [text[: len(expected)] for text in found] == ([expected] if expected else [])


def test_what_deepspeed_would_choose_otherwise_is_what_the_trainer_does() -> None:
    config = full(ZERO)
    assert config.pop("steps_per_print") > 10**9
    of_nobody = {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
    }
    assert config == ZERO | of_nobody
    values = {
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.5,
        "batch_size": 3,
        "precision": "bf16-true",
    }
    config = full(ZERO | {"bf16": {"enabled": "auto"}}, **values)
    assert config.items() >= {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "bf16": {"enabled": True},
    }.items()  # fmt: skip


@pytest.mark.parametrize(
    ("config", "batch_size", "sizes"),  # micro, accumulation
    [
        ({"train_batch_size": 32}, 4, (4, 4)),
        ({"train_batch_size": 32}, None, (16, 1)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, None, (4, 4)),
        ({"train_batch_size": "auto"}, 4, (4, 1)),
    ],
    ids=str,
)
def test_the_sizes_that_follow_from_the_whole_batch(
    config: dict[str, Any], batch_size: int | None, sizes: tuple[int, int]
) -> None:
    found = full(ZERO | config, batch_size=batch_size)
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == sizes
