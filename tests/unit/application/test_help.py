"""`--help` is about the program: its groups, its keys, and the comments of the config files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightning_lockstep
from lightning_lockstep._application.configs import search_path_of
from lightning_lockstep._application.entry import comments, help_text
from lightning_lockstep._application.overrides import read_arguments
from lightning_lockstep.train import main

CONF = Path(lightning_lockstep.__file__).parent / "conf"


def help_of(*arguments: str) -> str:
    parsed = read_arguments([*arguments, "--help"])
    search_path = search_path_of(main, "pkg://lightning_lockstep.conf", parsed)
    return help_text("lockstep-train", search_path, "lockstep_train", parsed.overrides)


def test_it_is_about_the_program_and_shows_each_key_with_its_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = help_of()
    assert text.startswith("lockstep-train trains a model on one or many ranks")
    assert "Powered by" not in text
    lines = [line.strip() for line in text.splitlines()]
    for file, package in (
        ("lockstep_train", ""),
        ("trainer/default", "trainer"),
        ("strategy/ddp", "strategy"),
        ("strategy/_life_cycle", "strategy"),
    ):
        found = comments((CONF / f"{file}.yaml").read_text(), package)
        assert len(found) >= 5
        for key, comment in found.items():
            if key.startswith("hydra"):
                continue
            (at,) = [number for number, line in enumerate(lines) if line.startswith(f"{key}=")]
            assert comment in " ".join(lines[at : at + 4]), key


def test_on_a_narrow_terminal_no_word_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_of().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("-") for line in lines)


def test_it_shows_what_the_command_line_leads_to() -> None:
    text = help_of("logger=[csv,wandb]", "callbacks=early_stopping", "trainer.max_epochs=7")
    assert "  logger=[csv,wandb]  " in text
    assert "  trainer.max_epochs=7  " in text
    assert "  callbacks.early_stopping.patience=" in text
    assert "  logger.wandb.project=null" in text


def test_the_file_that_introduces_a_key_explains_it() -> None:
    assert "cpu, gpu, tpu or auto" in help_of("trainer=gpu")


def test_the_keys_of_a_users_own_folder_are_shown(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: torch.nn.Linear\nin_features: 3 # how wide\n")
    text = help_of("--config-dir", str(tmp_path), "model=mine")
    assert "  model=mine " in text
    assert re.search(r"^  model\.in_features=3 +how wide$", text, re.MULTILINE)


def test_a_list_is_shown_whole_and_nothing_in_it_again(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("stages:\n  - {name: first, sizes: [{width: 8}]}\n")
    text = help_of("--config-dir", str(tmp_path), "model=mine")
    assert "  model.stages=[{'name': 'first', 'sizes': [{'width': 8}]}]" in text.splitlines()
    assert "model.stages." not in text


def test_comments_are_those_behind_the_values() -> None:
    text = "# no\na: 1 # first\nb: '# no' # second\nc:\n  d: [1, 2] # third\n  e: x#no\nf: {} # fourth\n"
    assert comments(text, "p") == {"p.a": "first", "p.b": "second", "p.c.d": "third", "p.f": "fourth"}
