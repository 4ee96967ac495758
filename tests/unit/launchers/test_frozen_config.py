"""The configuration that travels to other ranks, as text: faithful, and signed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hydra.conf import HydraConf
from omegaconf import OmegaConf

from lightning_lockstep._application.config_channel import Message
from lightning_lockstep.doctor.registry import Status
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.hydra import config_from_text, config_to_text


def test_values_arrive_and_hydras_own_part_keeps_its_type() -> None:
    own = OmegaConf.structured(HydraConf)
    own.job.config.override_dirname.exclude_keys = ["seed"]
    config = OmegaConf.create({"hydra": own, "a": {"b": [1, None, "${a}"], "later": "???"}})
    OmegaConf.set_struct(config, True)
    arrived = config_from_text(config_to_text(config))
    assert arrived == config
    assert arrived is not None and OmegaConf.get_type(arrived.hydra) is HydraConf
    assert OmegaConf.is_struct(arrived) and OmegaConf.is_struct(arrived.hydra)


def test_members_of_enumerations_arrive_as_such() -> None:
    config = OmegaConf.create({"a": {"b": [Status.OK, "${a}", "???"]}, "c": Status.PROBLEM, "d": "OK"})
    assert config_from_text(config_to_text(config)) == config


@dataclass
class Part:
    size: int = 3
    more: Any = 3


def test_an_object_of_a_structured_config_arrives_as_one() -> None:
    config = OmegaConf.create({"part": OmegaConf.structured(Part(size=4))})
    arrived = config_from_text(config_to_text(config, with_classes=True))
    assert arrived == config and OmegaConf.get_type(arrived.part) is Part  # type: ignore[union-attr]


def test_what_another_job_has_signed_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_JOB_TOKEN", "secret")
    data = Message(OmegaConf.create({"a": 1})).to_bytes()
    assert Message.from_bytes(data).config == {"a": 1}
    monkeypatch.setenv("LOCKSTEP_JOB_TOKEN", "another")
    with pytest.raises(LaunchError, match="is not signed with this job's token"):
        Message.from_bytes(data)
