"""`lockstep-train` with a module from a file in the folder where it is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.common.application.command_lines import MINE, faults_of, only

OWN = ("model=own", "model._target_=mine.Net", "data=own", "data._target_=mine.Data")


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.fixture
def importable(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the start of the command, in this process."""
    monkeypatch.chdir(own_folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(own_folder)])
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.mark.usefixtures("importable")
def test_the_keys_of_the_choices_that_it_replaces_are_one_fault_each() -> None:
    model, data = sorted(faults_of("model._target_=mine.Net", "data._target_=mine.Data"), reverse=True)
    assert model.startswith("model._target_=mine.Net: Net has no setting width, num_classes,")
    assert (
        "which the option of model brings. Add model=own, which brings none; what Net takes is then added"
        in model
    )
    assert "Add data=own" in data


@pytest.mark.usefixtures("importable")
def test_nothing_is_wrong_with_own_choices_and_a_setting_is_added_with_a_plus() -> None:
    assert faults_of(*OWN, "+model.hidden=3") == []
    assert only(faults_of("model.hidden=3", *OWN)).endswith("A new key is added with +model.hidden=3")
    near = only(faults_of(*OWN, "model.lr=3"))  # as `learning_rate` of another option is called
    assert near.endswith("A new key is added with +model.lr=3"), near
    misspelt = only(faults_of(*OWN, "+model.hiden=3"))
    assert misspelt.startswith("model.hiden=3: Net has no setting 'hiden'. Did you mean 'hidden'?")
    assert faults_of("model=own", "model._target_=mine.Everything", "~data") == []
    required = faults_of("model=own", "data=own")
    assert required == [
        f"{name}._target_ is required: add {name}._target_=module.Class" for name in ("data", "model")
    ]


def test_a_module_that_is_not_there_is_said_with_where_it_was_looked_for(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_folder)
    fault = only(faults_of("model=own", "model._target_=mien.Net", "data=digits"))
    assert f"There is no module 'mien', neither in {os.getcwd()} nor installed. Did you mean 'mine'?" in fault
    assert "Expected module.Class." in only(faults_of("model=own", "model._target_=Net", "data=digits"))
