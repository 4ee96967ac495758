"""Which file `ckpt_path` means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_lockstep._application.checkpoints import find_checkpoint
from lightning_lockstep.errors import ConfigurationError


def make(run: Path, *, age: float) -> Path:
    path = run / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_none_and_addresses_pass() -> None:
    for given in (None, "s3://bucket/last.ckpt"):
        assert find_checkpoint(given, run_folder=Path("run"), started_in=Path.cwd()) == given


def test_a_file_is_relative_to_where_the_program_was_started(tmp_path: Path) -> None:
    (tmp_path / "some.ckpt").touch()
    found = find_checkpoint("some.ckpt", run_folder=Path("run"), started_in=tmp_path)
    assert found == str(tmp_path / "some.ckpt")


def test_a_run_folder_means_its_last_checkpoint(tmp_path: Path) -> None:
    path = make(tmp_path / "run", age=0)
    assert find_checkpoint("run", run_folder=Path("x"), started_in=tmp_path) == str(path)


def test_last_means_the_newest_run_beside_this_one(tmp_path: Path) -> None:
    make(tmp_path / "b", age=50)
    newest = make(tmp_path / "a", age=10)
    assert find_checkpoint("last", run_folder=tmp_path / "c", started_in=tmp_path) == str(newest)


def test_a_run_that_is_continued_in_its_own_folder_means_its_own(tmp_path: Path) -> None:
    own = make(tmp_path / "own", age=50)
    make(tmp_path / "other", age=10)
    assert find_checkpoint("last", run_folder=tmp_path / "own", started_in=tmp_path) == str(own)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"ckpt_path=last: no run under .* has a checkpoints/last.ckpt yet"
    ):
        find_checkpoint("last", run_folder=tmp_path / "c", started_in=tmp_path)
    with pytest.raises(ConfigurationError, match=r"ckpt_path=no\.ckpt: there is no file"):
        find_checkpoint("no.ckpt", run_folder=tmp_path, started_in=tmp_path)
