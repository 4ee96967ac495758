"""Loggers: a missing package is an error of the settings, and where they write."""

from __future__ import annotations

import pytest
from lightning_utilities.core.imports import RequirementCache
from omegaconf import OmegaConf

from lightning_lockstep import ConfigurationError
from lightning_lockstep._application.records import places
from lightning_lockstep._application.run import build
from lightning_lockstep._lightning import CSVLogger, DummyLogger


def test_a_missing_package_is_an_error_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("no_wandb"))
    parts = {
        "strategy": "auto",
        "logger": {"wandb": {"_target_": "lightning_lockstep.components.WandbLogger"}},
        "trainer": {"_target_": "lightning_lockstep.components.Trainer"},
    }
    with pytest.raises(ConfigurationError, match=r"logger\.wandb: .*wandb"):
        build(OmegaConf.create(parts), own_callbacks=[])


def test_a_run_without_logs_has_no_place_of_a_log() -> None:
    assert places([DummyLogger(), CSVLogger("run", name="csv", version="0")]) == {"log (CSVLogger)": "run/csv/0"}
