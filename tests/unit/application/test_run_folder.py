"""A run has a folder of its own, and finds that of its former attempt."""

from __future__ import annotations

import multiprocessing as mp
import os
from pathlib import Path

import pytest

from lightning_lockstep._run_folder import (
    claimed_folder,
    forget_run_folders,
    without_claiming,
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    forget_run_folders()


def claim(wanted: str) -> str:
    forget_run_folders()
    return claimed_folder(wanted)


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    wanted = str(tmp_path / "outputs" / "12-00-00")
    with mp.get_context("fork").Pool(4) as pool:
        folders = pool.map(claim, [wanted] * 12)
    assert sorted(folders) == sorted([wanted, *(f"{wanted}-{number}" for number in range(1, 12))])
    assert all(Path(folder).is_dir() for folder in folders)


def test_a_run_keeps_its_folder_and_looking_makes_none(tmp_path: Path) -> None:
    wanted = str(tmp_path / "run")
    with without_claiming():
        assert claimed_folder(wanted) == wanted
    assert not Path(wanted).exists()
    Path(wanted).mkdir()
    assert claimed_folder(wanted) == claimed_folder(wanted) == f"{wanted}-1"
    with without_claiming():
        assert claimed_folder(wanted) == f"{wanted}-1"


@pytest.mark.parametrize(
    ("job", "count"),
    [
        ({"SLURM_JOB_ID": "12"}, "SLURM_RESTART_COUNT"),
        (
            {"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"},
            "SLURM_RESTART_COUNT",
        ),
        ({"TORCHELASTIC_RUN_ID": "none"}, "TORCHELASTIC_RESTART_COUNT"),
    ],
)
def test_a_later_attempt_finds_the_folder_of_the_former(
    job: dict[str, str], count: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    first = claim(str(tmp_path / "first"))
    assert claim(str(tmp_path / "other")) == str(tmp_path / "other"), "the same attempt, another run"
    os.utime(tmp_path / "other" / ".attempt", (1, 1))
    monkeypatch.setenv(count, "1")
    assert claim(str(tmp_path / "second")) == first
    assert not (tmp_path / "second").exists()
    monkeypatch.setenv(list(job)[-1], "99")
    assert claim(str(tmp_path / "third")) == str(tmp_path / "third"), "another job"


JOB = {
    "SLURM_JOB_ID": "8",
    "SLURM_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "8",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "n1",
}


@pytest.mark.parametrize(
    ("run_id", "later"),
    [
        ("8", {"SLURM_RESTART_COUNT": "1"}),
        ("8", {"SLURM_RESTART_COUNT": "1", "MASTER_ADDR": "n2"}),
        ("a1b2", {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "c3d4"}),  # --standalone
        ("8", {"TORCHELASTIC_RESTART_COUNT": "1", "MASTER_ADDR": "n2"}),
        ("none", {"TORCHELASTIC_RESTART_COUNT": "1", "MASTER_ADDR": "n2"}),
    ],
)
def test_torchrun_in_a_job_of_slurm_goes_on_after_a_requeue_and_after_a_restart(
    run_id: str, later: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**JOB, "TORCHELASTIC_RUN_ID": run_id}.items():
        monkeypatch.setenv(name, value)
    first = claim(str(tmp_path / "first"))
    for name, value in later.items():
        monkeypatch.setenv(name, value)
    assert claim(str(tmp_path / "second")) == first


@pytest.mark.parametrize(("run_id", "goes_on"), [("100", True), ("none", False)])
def test_a_restart_that_moves_rank_0_goes_on_if_the_job_has_a_run_id(
    run_id: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("MASTER_ADDR", "n1")
    first = claim(str(tmp_path / "first"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("MASTER_ADDR", "n2")
    assert claim(str(tmp_path / "second")) == (first if goes_on else str(tmp_path / "second"))
