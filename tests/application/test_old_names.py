"""Names that configs, command lines, programs and checkpoints of the release before hold."""

from __future__ import annotations

import importlib
import pickletools
import zipfile
from pathlib import Path

import pytest
from hydra.utils import instantiate
from lightning.pytorch import Trainer

import lightning_lockstep
from lightning_lockstep._doors.hydra_internals import locate
from lightning_lockstep.demo import ConvNet, DigitsData
from tests.application.command_lines import faults_of, look_at
from tests.helpers import run_ranks

OLD = {
    "callbacks.breakpoint.StopTogether": "StopTogether",
    "callbacks.fp32_modules.FP32Modules": "FP32Modules",
    "callbacks.overflow.OverflowDetector": "OverflowDetector",
    "workloads.byte_gpt.ByteGPT": "demo.ByteGPT",
    "workloads.cnn.ConvNet": "demo.ConvNet",
    "workloads.digits.DigitsData": "demo.DigitsData",
    "workloads.source_text.SourceTextData": "demo.SourceTextData",
}
# Its file has kept its name: nothing to say.
UNCHANGED = "callbacks.fp32_modules.FP32Modules"
SETTINGS = {"callbacks.fp32_modules.FP32Modules": {"modules": ["head"]}}


@pytest.mark.parametrize("old", OLD)
def test_a_config_with_the_old_path_is_instantiated(old: str, recwarn: pytest.WarningsRecorder) -> None:
    made = instantiate({"_target_": f"lightning_lockstep.{old}", **SETTINGS.get(old, {})})
    assert type(made) is locate(f"lightning_lockstep.{OLD[old]}")
    said = [str(warning.message) for warning in recwarn if warning.category is DeprecationWarning]
    expected = (
        f"lightning_lockstep.{old} is now lightning_lockstep.{OLD[old]};"
        " the old name is removed after the next release."
    )
    assert said == ([] if old == UNCHANGED else [expected])


@pytest.mark.parametrize("old", OLD)
def test_a_program_that_imports_the_old_path_runs(old: str) -> None:
    module, _, name = f"lightning_lockstep.{old}".rpartition(".")
    if old == UNCHANGED:
        value = getattr(importlib.import_module(module), name)
    else:
        with pytest.warns(DeprecationWarning, match=f"is now lightning_lockstep.{OLD[old]};"):
            value = getattr(importlib.import_module(module), name)
    assert value is locate(f"lightning_lockstep.{OLD[old]}")


def test_another_name_under_an_old_path_is_an_attribute_error() -> None:
    old = importlib.import_module("lightning_lockstep.workloads.cnn")
    with pytest.raises(
        AttributeError, match=r"module 'lightning_lockstep.workloads.cnn' has no attribute 'Net'"
    ):
        _ = old.Net


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_the_command_line_takes_an_old_path_and_says_the_new_one_once() -> None:
    checked = look_at("-m", "model._target_=lightning_lockstep.workloads.cnn.ConvNet", "seed=1,2")
    assert checked.faults == []
    assert checked.old_names == [
        "model._target_=lightning_lockstep.workloads.cnn.ConvNet is now lightning_lockstep.demo.ConvNet;"
        " the old name is removed after the next release."
    ]
    # and its settings are checked as before
    wrong = faults_of("model._target_=lightning_lockstep.workloads.cnn.ConvNet", "model.width=12")
    assert "model.width=12: expected a multiple of 8" in wrong[0]


def test_the_old_choice_and_its_overrides_are_read_and_the_new_name_is_said_once() -> None:
    checked = look_at("callbacks=[breakpoint,lr_monitor]", "callbacks.breakpoint.exit_code=3")
    assert checked.faults == []
    assert checked.old_names == [
        "callbacks.breakpoint is now callbacks.stop_together; the old name is removed after the next release."
    ]
    assert look_at("callbacks=stop_together", "callbacks.stop_together.exit_code=3").old_names == []
    assert "exit_code" in faults_of("callbacks=breakpoint", "callbacks.breakpoint.exit_code=x")[0]


def test_the_old_choice_has_the_settings_of_the_new_one() -> None:
    folder = Path(lightning_lockstep.__file__).parent / "conf" / "callbacks"
    old, new = (
        (folder / f"{name}.yaml").read_text().splitlines() for name in ("breakpoint", "stop_together")
    )
    assert old[1] == "breakpoint:"
    assert old[2:] == new[2:]


def fit_and_save(path: str) -> int:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        callbacks=[lightning_lockstep.SyncedEarlyStopping("train_loss"), lightning_lockstep.StopTogether()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(ConvNet(width=8), DigitsData())
    trainer.save_checkpoint(path)
    return int(ConvNet.load_from_checkpoint(path, weights_only=True).hparams["width"])


@pytest.mark.slow
def test_a_checkpoint_names_no_module_of_the_package(tmp_path: Path) -> None:
    """So it loads however files are moved, and whatever release wrote it."""
    path = tmp_path / "last.ckpt"
    assert run_ranks(1, fit_and_save, str(path), backend=None) == [8]
    with zipfile.ZipFile(path) as file:
        (data,) = [name for name in file.namelist() if name.endswith("data.pkl")]
        texts = [str(text) for _, text, _ in pickletools.genops(file.read(data))]
    assert any("EarlyStopping" in text for text in texts)
    assert [text for text in texts if "lightning_lockstep" in text] == []
