"""The report at the end of a run."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lightning_lockstep._application.records import Summary, read_metrics, remove_earlier_summary, write

SUMMARY = Summary(
    metrics={"val_loss": 0.5, "train_loss": float("nan")},
    steps=3,
    epochs=1,
    ranks=1,
    samples_per_second=None,
    wall_time=1.0,
    files={},
)


def test_the_process_that_started_the_ranks_reads_the_metrics(tmp_path: Path) -> None:
    write(SUMMARY, tmp_path / "run")
    assert str(read_metrics(tmp_path / "run")) == str(SUMMARY.metrics)


def test_the_summary_of_an_earlier_attempt_is_not_read_as_that_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(SUMMARY, tmp_path)
    remove_earlier_summary(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    write(SUMMARY, tmp_path)
    assert "summary.json could not be written" in capsys.readouterr().err
    assert read_metrics(tmp_path) == {}


def full_disk(path: Path, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_finished_run_does_not_fail_where_its_summary_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").mkdir()
    write(SUMMARY, tmp_path)
    assert f"summary.json could not be written to {tmp_path}: Is a directory." in capsys.readouterr().err
    assert read_metrics(tmp_path) == {}
    assert read_metrics(tmp_path / "empty") == {}
