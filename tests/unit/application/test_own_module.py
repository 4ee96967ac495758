"""`lockstep-train` with a module from a file in the folder where it is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lightning_lockstep._application.overrides import as_current_job
from lightning_lockstep._application.run import build
from lightning_lockstep.errors import ConfigurationError
from tests.models.application.command_lines import MINE, faults_of, look_at, only

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
def test_nothing_is_wrong_with_own_choices_and_a_setting_is_added_with_a_plus() -> None:
    assert faults_of(*OWN, "+model.hidden=3") == []
    assert only(faults_of("model.hidden=3", *OWN)).endswith("A new key is added with +model.hidden=3")
    near = only(faults_of(*OWN, "model.lr=3"))
    assert near.endswith("A new key is added with +model.lr=3"), near
    misspelt = only(faults_of(*OWN, "+model.hiden=3"))
    assert misspelt.startswith("model.hiden=3: Net has no setting 'hiden'. Did you mean 'hidden'?")
    assert faults_of("model=own", "model._target_=mine.Everything", "~data") == []
    lacking = faults_of("model=own", "model._target_=torch.nn.Linear", "+model.in_features=3", *OWN[2:])
    assert lacking == ["model.out_features: Linear needs it: add +model.out_features=..."]
    required = faults_of("model=own", "data=own")
    assert required == [f"{name}._target_ is required: add {name}._target_=module.Class" for name in ("data", "model")]


#: In a project with a class of its own behind each group: what is wrong, and how what is said about it ends.
IN_A_PROJECT = [
    ("model.hiden=3", "there is no key 'hiden' in 'model'. Did you mean 'hidden'?"),
    ("model.learning_rate=0.1", "It has: hidden, lr. A new key is added with +model.learning_rate=0.1"),
    ("model.context=3", "It has: hidden, lr. A new key is added with +model.context=3"),
    ("+experiment=wide", "the group 'experiment' is in the configuration already: write experiment=wide"),
    (
        "+optimzer=adam",
        "nothing refers to it. A key that only your own code reads is added with ++optimzer=adam",
    ),
    ("optim=adam", "group 'optim' has no option 'adam'. It has none."),
]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(("argument", "end"), IN_A_PROJECT)
def test_the_keys_of_a_project_come_first_and_advice_is_never_about_models_of_others(
    argument: str, end: str, own_folder: Path
) -> None:
    for name, text in {
        "config.yaml": "defaults: [lockstep_train, override data: mine, override model: mine, _self_]\n"
        "hydra: {searchpath: ['pkg://lightning_lockstep.conf']}\n",
        "model/mine.yaml": "_target_: mine.Rated\nhidden: 3\n",
        "data/mine.yaml": "_target_: mine.Data\nsize: 16\n",
        "experiment/wide.yaml": "# @package _global_\nmodel: {hidden: 64}\n",
    }.items():
        file = own_folder / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (own_folder / "conf" / "optim").mkdir()
    with (own_folder / "mine.py").open("a") as file:
        file.write(
            "\n\nclass Rated(Net):\n    def __init__(self, hidden=4, lr=0.1):\n        super().__init__(hidden)\n"
        )
    fault = only(faults_of("--config-dir", "conf", "--config-name", "config", argument))
    assert fault.startswith(f"{argument}: ") and fault.endswith(end)


@pytest.mark.usefixtures("importable")
def test_what_is_wrong_with_parts_of_other_parts_is_said_of_those() -> None:
    deepspeed = built("strategy=deepspeed_stage_2", "+strategy.config.zero_optimization.stag=1")
    assert deepspeed == [
        "strategy.config.zero_optimization.stag=1: DeepSpeed has no such key in this section. Did you mean 'stage'?"
    ]
    stock = (
        "+callbacks.mine._target_=lightning.pytorch.callbacks.EarlyStopping",
        "+callbacks.mine.monitor=val_loss",
    )
    text = "trainer: Found more than one stateful callback of type `EarlyStopping`."
    assert only(built("callbacks=early_stopping", *stock)).startswith(text)


def built(*arguments: str) -> list[str]:
    """What is wrong with a configuration in which no component is wrong by itself."""
    faults, config = look_at(*arguments)
    assert config is not None and faults == []
    with as_current_job(config, 0), pytest.raises(ConfigurationError) as caught:
        build(config, own_callbacks=[])
    return list(caught.value.faults)


def test_a_module_that_is_not_there_is_said_with_where_it_was_looked_for(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_folder)
    fault = only(faults_of("model=own", "model._target_=mien.Net", "data=digits"))
    assert f"There is no module 'mien' for a run that starts in {os.getcwd()}. Expected module.Class" in fault
    inside = only(faults_of("model=own", "model._target_=lightning_lockstep.dmeo.ConvNet", "data=digits"))
    assert "No module named 'lightning_lockstep.dmeo'" in inside
    whole = only(faults_of("model=own", "model._target_=lightning_lockstep.demo", "data=digits"))
    assert "expected a class or a function, not a module." in whole
