"""The config as the user has written it, and the options of the strategy that join it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_lockstep.deepspeed.config import modern_spelling, read_config, with_named_options
from lightning_lockstep.errors import ConfigurationError
from tests.common.deepspeed.example_configs import EXAMPLES


def joined(config: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    named = {"stage": None, "offload_optimizer": None, "offload_param": None, "nvme_path": None}
    return with_named_options(config or {}, **(named | options))


def faults_of(config: dict[str, Any] | None = None, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        joined(config, **options)
    return caught.value.faults


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(text)
    return path


def test_a_config_is_copied_down_to_the_last_level() -> None:
    group = object()
    given = {"optimizer": {"params": {"betas": [0.9, 0.99]}}, "tensor_parallel": {"tp": {"tp_group": group}}}
    config = read_config(given)
    assert config == given
    config["optimizer"]["params"]["betas"].append(0)
    assert given["optimizer"]["params"]["betas"] == [0.9, 0.99]
    assert config["tensor_parallel"]["tp"]["tp_group"] is group, "a process group cannot be copied"


def test_a_config_of_omegaconf_is_resolved_to_plain_containers() -> None:
    given = OmegaConf.create({"n": 3, "zero_optimization": {"stage": "${n}"}, "aio": {"sizes": [1, "${n}"]}})
    config = read_config(given)
    assert config == {"n": 3, "zero_optimization": {"stage": 3}, "aio": {"sizes": [1, 3]}}
    assert type(config["zero_optimization"]) is dict and type(config["aio"]["sizes"]) is list


def test_a_value_that_omegaconf_misses_is_a_fault() -> None:
    with pytest.raises(ConfigurationError, match=r"stage.*every value is given"):
        read_config(OmegaConf.create({"zero_optimization": {"stage": "???"}}))


def test_a_file_is_read_by_its_path_or_its_name(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"zero_optimization": {"stage": 3}}))
    assert read_config(path) == read_config(str(path)) == {"zero_optimization": {"stage": 3}}


def test_comments_in_a_file_are_right_where_hjson_is_installed(tmp_path: Path) -> None:
    path = written(tmp_path, '{\n  // which stage\n  "zero_optimization": {"stage": 3,},  # the last\n}')
    assert read_config(path) == {"zero_optimization": {"stage": 3}}


def test_without_hjson_a_comment_is_a_fault_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = written(tmp_path, '{\n  // which stage\n  "zero_optimization": {"stage": 3}\n}')
    with pytest.raises(ConfigurationError, match=r"line 2, column 3.*the package hjson"):
        read_config(path)


@pytest.mark.parametrize("with_hjson", [True, False])
def test_what_is_not_json_is_shown_with_its_line_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_hjson: bool
) -> None:
    if not with_hjson:
        monkeypatch.setitem(sys.modules, "hjson", None)
    path = written(tmp_path, '{"zero_optimization": {"stage": 3},\n "bf16": }')
    with pytest.raises(ConfigurationError, match=r"ds\.json': not JSON at line 2, column \d+: "):
        read_config(path)


@pytest.mark.parametrize("comment", ["", "# a comment\n"])
def test_a_key_that_stands_there_twice_is_a_fault(tmp_path: Path, comment: str) -> None:
    twice = '{"fp16": {"enabled": true, "enabled": false}, "bf16": {}, "bf16": {}}'
    path = written(tmp_path, comment + twice)
    with pytest.raises(ConfigurationError, match="'enabled', 'bf16'"):
        read_config(path)


def test_a_file_that_is_not_there_is_named_with_the_folder_it_was_looked_for_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        read_config("conf/ds.json")
    assert "config='conf/ds.json': there is no such file" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("given", [42, ["zero_optimization"]])
def test_what_is_no_mapping_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a mapping"):
        read_config(given)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_documented_configs_are_joined_without_a_fault(name: str) -> None:
    before = json.dumps(EXAMPLES[name])
    config = joined(EXAMPLES[name])
    assert json.dumps(EXAMPLES[name]) == before, "the given config is left alone"
    given = EXAMPLES[name].get("zero_optimization", {"stage": 2})
    assert config["zero_optimization"]["stage"] == (1 if given is True else given["stage"])


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {}}, {"zero_optimization": {"stage": "auto"}}])
def test_the_stage_is_2_if_nobody_says_one(config: dict[str, Any]) -> None:
    assert joined(config)["zero_optimization"]["stage"] == 2
    assert joined(config, stage=3)["zero_optimization"]["stage"] == 3


def test_option_and_config_may_say_the_same() -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}}}
    assert joined(config, stage=3, offload_param="cpu") == config


def test_every_contradiction_is_shown_at_once_with_both_values() -> None:
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    stage, device = faults_of(config, stage=2, offload_optimizer="none")
    assert stage.startswith("stage=2 and zero_optimization.stage=3 in the config: expected the same")
    assert "offload_optimizer='none' and zero_optimization.offload_optimizer.device='cpu'" in device


def test_offloading_is_added_to_the_sections_that_are_there() -> None:
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 0.5, "device": "auto"}}}
    zero = joined(config, offload_optimizer="cpu", offload_param="cpu")["zero_optimization"]
    assert zero["offload_optimizer"] == {"ratio": 0.5, "device": "cpu"}
    assert zero["offload_param"] == {"device": "cpu"}


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({}, {"stage": 4}, "stage=4: expected one of 0, 1, 2, 3"),
        ({}, {"offload_optimizer": "gpu"}, "offload_optimizer='gpu': expected one of 'none', 'cpu', 'nvme'"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvm"}}},
            {},
            "zero_optimization.offload_optimizer.device='nvm': expected one of 'none', 'cpu', 'nvme'. Did you mean"
            " 'nvme'?",
        ),
        (
            {"zero_optimization": {"offload_optimizer": "cpu"}},
            {},
            "zero_optimization.offload_optimizer='cpu': expected a section such as {'device': 'cpu'}",
        ),
        ({}, {"offload_param": "cpu"}, "offload_param='cpu' with stage=2: expected stage 3"),
        (
            {},
            {"offload_optimizer": "nvme", "stage": 3},
            "zero_optimization.offload_optimizer.nvme_path=None: expected the path of a folder",
        ),
        ({}, {"nvme_path": "/nvme"}, "nvme_path='/nvme': expected None"),
        (
            {
                "zero_optimization": {
                    "cpu_offload": True,
                    "offload_optimizer": {"device": "cpu"},
                }
            },
            {},
            "zero_optimization.cpu_offload=True and zero_optimization.offload_optimizer={'device': 'cpu'}",
        ),
    ],
)
def test_what_cannot_be(config: dict[str, Any], options: dict[str, Any], expected: str) -> None:
    (fault,) = faults_of(config, **options)
    assert fault.startswith(expected)


def test_the_folder_on_nvme_goes_where_the_device_is_nvme(tmp_path: Path) -> None:
    zero = joined(stage=3, offload_optimizer="nvme", offload_param="cpu", nvme_path=tmp_path)[
        "zero_optimization"
    ]
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": str(tmp_path)}
    assert zero["offload_param"] == {"device": "cpu"}


def test_two_folders_on_nvme_are_a_contradiction() -> None:
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}}
    assert joined(config, nvme_path="/a/") == config
    (fault,) = faults_of(config, nvme_path="/b")
    assert "nvme_path='/b' and zero_optimization.offload_optimizer.nvme_path='/a'" in fault


def test_former_spellings_are_what_deepspeed_takes_them_for() -> None:
    assert modern_spelling({"zero_optimization": True, "allgather_size": 5}) == {
        "zero_optimization": {"stage": 1, "allgather_bucket_size": 5}
    }
    assert modern_spelling({"zero_optimization": False}) == {"zero_optimization": {"stage": 0}}
    assert modern_spelling({"bfloat16": {"enabled": True}}) == {"bf16": {"enabled": True}}
    assert modern_spelling({"bfloat16": {"enabled": True}, "bf16": {}}) == {"bf16": {}}
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_param": False}
    assert modern_spelling({"zero_optimization": zero}) == {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    }
