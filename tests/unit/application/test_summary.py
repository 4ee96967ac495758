"""The report at the end of a run."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_lockstep._application.overrides import Sweep
from lightning_lockstep._application.records import (
    Summary,
    read_metrics,
    remove_earlier_summary,
    show,
    write,
)

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


def test_a_path_stands_in_one_line_however_narrow_the_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    path = "outputs/train/2026-11-28_20-27-32/checkpoints/best.ckpt"
    show(replace(SUMMARY, files={"best checkpoint": str(Path.cwd() / path)}))
    assert f"best checkpoint: {path}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("mark", ["_", "/"])
def test_metrics_of_training_come_first_and_those_of_the_test_last(
    mark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{stage}{mark}loss" for stage in ("test", "val", "train")] + ["lr"]
    show(replace(SUMMARY, metrics=dict.fromkeys(names, 0.5)))
    words = capsys.readouterr().out.split()
    assert [word for word in words if word in names] == [names[2], names[1], names[0], names[3]]


def test_the_report_of_a_sweep_has_its_jobs_and_the_commands_of_those_that_were_not_run() -> None:
    sweep = Sweep()
    assert sweep.report() == ""
    sweep.plan([["a=1", "a=2", "a='x y'"], ["b=0"]], ["python", "train.py"])
    for number, error in enumerate((None, ValueError("two is\ntoo many"))):
        task = {"overrides": {"task": [f"a={number + 1}", "b=0"]}, "job": {"num": number}}
        sweep.note(OmegaConf.create({"hydra": task}), None if error else 0.25, error)
    assert sweep.report().splitlines() == [
        "lightning-lockstep: the sweep",
        "  job  overrides  objective  exit",
        "  0    a=1 b=0    0.25       0",
        "  1    a=2 b=0    -          ValueError: two is",
        "1 of its 3 jobs were not run. To run them:",
        "  python train.py 'a='\"'\"'x y'\"'\"'' b=0",
    ]


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
