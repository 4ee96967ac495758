"""The loggers of Weights & Biases and MLflow: where a run goes, decided without making one."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lightning_lockstep import ConfigurationError
from lightning_lockstep.logs.trackers import MLFlowLogger, WandbLogger

pytest.importorskip("wandb", reason="install wandb and mlflow")
pytest.importorskip("mlflow", reason="install wandb and mlflow")


@pytest.fixture(autouse=True)
def nobody_has_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def log_in(tmp_path: Path, host: str) -> None:
    (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {'0' * 40}\n")
    (tmp_path / "netrc").chmod(0o600)


@pytest.mark.parametrize(
    ("offline", "variable", "logged_in", "mode"),
    [
        (None, None, False, "offline"),
        (None, None, True, "online"),
        (None, "disabled", False, None),  # left to wandb
        (True, "online", True, "offline"),
        (False, None, False, "online"),
    ],
)
def test_the_settings_come_first_then_the_environment_then_the_account(
    offline: bool | None,
    variable: str | None,
    logged_in: bool,
    mode: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    if logged_in:
        log_in(tmp_path, "api.wandb.ai")
    assert WandbLogger(save_dir=tmp_path, offline=offline)._wandb_init["mode"] == mode


def test_checkpoints_of_an_offline_run_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"log_model='all': expected false for a run that is offline"
    ):
        WandbLogger(log_model="all")


def test_a_logger_can_be_made_and_sent_to_a_rank_without_a_file(tmp_path: Path) -> None:
    logger = pickle.loads(pickle.dumps(MLFlowLogger(save_dir=tmp_path / "mlflow")))
    assert not (tmp_path / "mlflow").exists()
    assert logger.location == f"{tmp_path}/mlflow/mlflow.db"
