"""`--help` is about the program: its groups, and the keys and comments of the config files in use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.utils import setup_globals

from lightning_lockstep._application.configs import Loader, search_path_of
from lightning_lockstep._application.overrides import read_arguments
from lightning_lockstep.train import main


def loader(*arguments: str) -> Loader:
    parsed = read_arguments([*arguments, "--help"])
    search_path = search_path_of(main, "pkg://lightning_lockstep.conf", parsed)
    setup_globals()
    return Loader(search_path, "lockstep_train", parsed.overrides)


def help_of(*arguments: str) -> str:
    overrides = [word for word in arguments if "=" in word]
    return loader(*arguments).help("lockstep-train", overrides)


def test_it_is_about_the_program_and_shows_groups_and_keys_with_their_comments() -> None:
    text = help_of("logger=[csv,wandb]", "callbacks=early_stopping")
    assert text.startswith("lockstep-train trains a model on one or many ranks")
    lines = text.splitlines()
    assert "checkpoint: best, every_epoch, none" in lines
    for key in (
        "## trainer/default.yaml, below trainer",
        "max_epochs: 5 # epochs",
        "seed: 1 # seed of weights, sample order and everything random",
        "  patience: 3 # checks without an improvement",
        "## strategy/_life_cycle.yaml, below strategy",
        "## logger/wandb.yaml, below logger",
    ):
        assert key in lines, text
    assert "defaults:" not in text and "Powered by" not in text


def test_the_keys_of_a_users_own_folder_are_shown(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: torch.nn.Linear\nin_features: 3 # how wide\n")
    text = help_of("--config-dir", str(tmp_path), "model=mine")
    assert "## model/mine.yaml, below model\n_target_: torch.nn.Linear\nin_features: 3 # how wide\n" in text


def test_one_group_is_shown_with_the_keys_of_each_of_its_options() -> None:
    text = loader().help_of("callbacks")
    parts = [line for line in text.splitlines() if line.startswith("## ")]
    assert "## callbacks/early_stopping.yaml" in parts and "## callbacks/stop_together.yaml" in parts
    assert "  patience: 3 # checks without an improvement" in text.splitlines()
    assert not any(part.startswith("## strategy") for part in parts)
    with pytest.raises(ValueError, match=r"--help callback: there is no such group. Did you mean 'callbacks'\?"):
        loader().help_of("callback")
