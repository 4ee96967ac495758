"""Weights & Biases and MLflow: where a run goes, decided without making one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_lockstep.logs.trackers import has_wandb_account, tracking_uri_of


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


def test_an_api_key_is_found_where_wandb_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_wandb_account()
    log_in(tmp_path, "api.wandb.ai")
    assert has_wandb_account()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_account(), "an account at another server"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert has_wandb_account()


def test_a_netrc_that_cannot_be_read_is_no_account(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("no such thing\n")
    assert not has_wandb_account()


def test_the_store_is_the_one_given_then_the_environments_then_a_file(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://there:5000"}
    assert tracking_uri_of(tmp_path, "http://here:5000", environ) == "http://here:5000"
    assert tracking_uri_of(tmp_path, None, environ) == "http://there:5000"
    assert tracking_uri_of(tmp_path, None, {}) == f"sqlite:///{tmp_path}/mlflow.db"
