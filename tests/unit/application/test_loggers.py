"""Loggers: a missing package is named, and what they get of the configuration."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from lightning_lockstep._application.records import places
from lightning_lockstep._lightning import CSVLogger, DummyLogger
from tests.common.application.command_lines import faults_of, only


@pytest.mark.parametrize("found", [None, ModuleSpec("a_bare_folder", None)], ids=["nothing", "folder"])
@pytest.mark.parametrize(
    ("logger", "missing", "extra"),
    [
        ("wandb", {"wandb"}, "wandb"),
        ("mlflow", {"mlflow"}, "mlflow"),
        ("tensorboard", {"tensorboard", "tensorboardX"}, "tensorboard"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    logger: str, missing: set[str], extra: str, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def find_other(name: str, *rest: Any) -> Any:
        return found if name in missing else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_other)
    assert only(faults_of(f"logger={logger}")) == (
        f"logger.{logger} needs the package {min(missing)!r}, which is not installed here."
        f" Install it with: pip install 'lightning-lockstep[{extra}]'"
    )


def test_a_run_without_logs_has_no_place_of_a_log() -> None:
    assert places([DummyLogger(), CSVLogger("run", name="csv", version="0")]) == {
        "log (CSVLogger)": "run/csv/0"
    }
