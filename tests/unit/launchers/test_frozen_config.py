"""The configuration that travels to other ranks: faithful, signed, and nothing but a configuration."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hydra.conf import HydraConf
from omegaconf import MISSING, OmegaConf

from lightning_lockstep.distributed.rendezvous import signed
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.hydra import config_from_bytes, config_to_bytes


class Color(Enum):
    RED = 1


@dataclass
class Inner:
    number: int = 1
    color: Color = Color.RED
    path: Path = Path("/a")
    names: dict[str, int] = field(default_factory=lambda: {"a": 1})
    values: list[float] = field(default_factory=lambda: [0.5])
    either: int | str = 3
    some: int | None = None
    raw: bytes = b"x"
    missing: int = MISSING


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("echo it ran",)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_JOB_TOKEN", "secret")


def test_types_and_values_arrive() -> None:
    config = OmegaConf.create(
        {
            "hydra": OmegaConf.structured(HydraConf),
            "inner": OmegaConf.structured(Inner),
            "a": {"b": [1, None, "${a}"]},
        }
    )
    arrived = config_from_bytes(config_to_bytes(config))
    assert arrived == config
    assert OmegaConf.get_type(arrived.inner) is Inner and arrived.inner.color is Color.RED


def test_what_is_no_configuration_is_not_unpickled(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pickle.UnpicklingError, match="system is no part of a configuration"):
        config_from_bytes(signed(pickle.dumps(Harmful())))
    assert "it ran" not in capfd.readouterr().out


def test_what_another_job_has_signed_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = config_to_bytes(OmegaConf.create({"a": 1}))
    monkeypatch.setenv("LOCKSTEP_JOB_TOKEN", "another")
    with pytest.raises(LaunchError, match="is not signed with this job's token"):
        config_from_bytes(data)
