"""Which file `ckpt_path` means, and which is the best one of a resumed run."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightning_lockstep._application.checks import checkpoint_folders
from lightning_lockstep._application.run import RunRecord
from lightning_lockstep._run_folder import find_checkpoint, mark_begin
from lightning_lockstep.components import ModelCheckpoint
from lightning_lockstep.errors import ConfigurationError
from tests.models.stopping.fits import Module, fit


def make(run: Path, *, age: float) -> Path:
    path = run / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_what_each_word_means(tmp_path: Path) -> None:
    (tmp_path / "some.ckpt").touch()
    old = make(tmp_path / "b", age=50)
    newest = make(tmp_path / "a", age=10)
    for given, own, expected in (
        (None, "c", None),
        ("s3://bucket/last.ckpt", "c", "s3://bucket/last.ckpt"),
        ("some.ckpt", "c", str(tmp_path / "some.ckpt")),  # from where the program was started
        ("b", "c", str(old)),  # a run folder
        ("last", "c", str(newest)),  # of the runs beside this one
        ("last", "b", str(old)),  # of this run, which is continued in its own folder
    ):
        found = find_checkpoint(given, run_folder=tmp_path / own, started_in=tmp_path)
        assert found == expected, (given, own)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ckpt_path=last: no run under .* has a checkpoints/last.ckpt yet"):
        find_checkpoint("last", run_folder=tmp_path / "c", started_in=tmp_path)
    with pytest.raises(ConfigurationError, match=r"ckpt_path=no\.ckpt: there is no checkpoint"):
        find_checkpoint("no.ckpt", run_folder=tmp_path, started_in=tmp_path)


def make_folder(path: Path, *, age: float) -> Path:
    """A checkpoint as DeepSpeed leaves it, as far as names tell."""
    (path / "checkpoint").mkdir(parents=True)
    (path / "checkpoint" / "mp_rank_00_model_states.pt").write_bytes(b"weights")
    (path / "latest").write_text("checkpoint")
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_folder_of_deepspeed_is_a_checkpoint(tmp_path: Path) -> None:
    here = tmp_path / "run"
    newest = make_folder(here / "checkpoints" / "last.ckpt", age=10)
    make_folder(here / "checkpoints" / "best.ckpt", age=50)
    for given in ("auto", "last", str(newest), str(here)):
        assert find_checkpoint(given, run_folder=here, started_in=tmp_path) == str(newest)


def test_neither_an_unfinished_folder_nor_a_consolidated_file_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    whole = make_folder(folder / "last.ckpt", age=50)
    make_folder(folder / "last.ckpt.writing", age=1)
    with zipfile.ZipFile(folder / "last.consolidated.ckpt", "w") as archive:
        archive.writestr("weights", b"")
    (folder / "empty.ckpt").mkdir()
    assert find_checkpoint("auto", run_folder=tmp_path, started_in=tmp_path) == str(whole)


def test_what_a_killed_save_has_put_aside_is_found(tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    aside = make_folder(path.with_name("last.ckpt.before"), age=10)
    make_folder(path.with_name("last.ckpt.writing"), age=1)
    for given, own in (("auto", "run"), ("last", "run"), ("last", "new"), ("run", "new"), (str(path), "new")):
        assert find_checkpoint(given, run_folder=tmp_path / own, started_in=tmp_path) == str(aside)
    make_folder(path, age=50)
    assert find_checkpoint("auto", run_folder=tmp_path / "run", started_in=tmp_path) == str(path)


def save(path: Path, *, age: float, **content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, **content}, path)
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_checkpoint_of_weights_alone_is_not_resumed(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints" / "best.ckpt", age=10)
    assert find_checkpoint("auto", run_folder=tmp_path, started_in=tmp_path) is None
    last = save(tmp_path / "checkpoints" / "last.ckpt", age=50, optimizer_states=[], hyper_parameters={"p": Path("x")})
    assert find_checkpoint("auto", run_folder=tmp_path, started_in=tmp_path) == str(last)


def test_what_a_run_saves_elsewhere_is_found_and_what_others_have_saved_there_is_not(tmp_path: Path) -> None:
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    run.mkdir()
    config = OmegaConf.create(
        {
            "checkpoint": {
                "last": {"dirpath": "scratch"},
                "best": {"dirpath": "s3://bucket/run"},
                "none": None,
            },
            "callbacks": {
                "stop_together": {"dirpath": str(tmp_path / "stopped")},
                "lr": {"interval": "step"},
            },
            "trainer": {"default_root_dir": str(tmp_path / "root")},
        }
    )

    def found() -> str | None:
        folders = checkpoint_folders(config, run_folder=run, started_in=tmp_path)
        return find_checkpoint("auto", run_folder=run, started_in=tmp_path, folders=folders)

    mark_begin(run)
    os.utime(run / ".begun", (time.time() - 100,) * 2)
    mark_begin(run)  # a later attempt
    save(scratch / "last.ckpt", age=200, optimizer_states=[])
    assert found() is None, "of another run"
    for age, path in (
        (50, scratch / "last.ckpt"),
        (40, tmp_path / "stopped" / "last.ckpt"),
        (30, tmp_path / "root" / "hpc_ckpt_1.ckpt"),
    ):
        save(path, age=age, optimizer_states=[])
        assert found() == str(path)
    own = save(run / "checkpoints" / "last.ckpt", age=20, optimizer_states=[])
    assert found() == str(own)


@pytest.mark.parametrize("then", [0.5, 0.1])
def test_the_best_checkpoint_of_a_resumed_run_stays_the_best_until_there_is_a_better_one(
    then: float, tmp_path: Path
) -> None:
    losses = [0.2, 0.3, then]

    def best_of(folder: str, epochs: int, **resumed: str) -> str:
        best = ModelCheckpoint(tmp_path / folder, "best", "m")
        last = ModelCheckpoint(tmp_path / folder, "last")
        callbacks, more = [best, last, RunRecord()], {"enable_checkpointing": True, **resumed}
        module = Module(lambda _, epoch: losses[epoch])
        fit(module, callbacks, str(tmp_path), max_epochs=epochs, **more)
        return str(Path(best.best_model_path).relative_to(tmp_path))

    assert best_of("first", 2) == "first/best.ckpt"
    again = best_of("second", 3, ckpt_path=str(tmp_path / "first" / "last.ckpt"))
    assert again == ("second/best.ckpt" if then < 0.2 else "first/best.ckpt")
    assert (tmp_path / "first" / "best.ckpt").is_file()
