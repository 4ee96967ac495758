"""What is said about command lines that cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException

from lightning_lockstep._application import checks, overrides
from lightning_lockstep._application.signatures import show_faults
from tests.models.application.command_lines import faults_of, only


def test_nothing_is_said_about_a_good_command_line_and_nothing_is_written() -> None:
    assert faults_of("strategy=ddp", "trainer.devices=2", "trainer.max_epochs=1", "seed=3") == []
    assert list(Path.cwd().iterdir()) == []


#: Wrong arguments with a part of what is said about each; those of a list are given together.
WRONG = [
    [
        ("stategy=ddp", "there is no key 'stategy' in the configuration. Did you mean 'strategy'"),
        ("max_epochs=3", "Did you mean 'trainer.max_epochs'?"),
        ("callbacks=[lr_monitr]", "no option 'lr_monitr'. Did you mean 'lr_monitor'"),
        ("trainer.precision=16-mixd", "Did you mean '16-mixed'"),
        ("trainer.max_epochs=abc", "expected a whole number or null."),
        ("+data.foo=3", "DigitsData has no setting 'foo'. It takes batch_size, global_batch_size,"),
        ("+modle.width=3", "Did you mean 'model'? A key that only your own code reads is added with ++"),
        (
            "+optimzer=adam",
            "there is no key 'optimzer' in the configuration, and nothing refers to it. A key",
        ),
        ("trainer.plugins=x", "A new key is added with +trainer.plugins=x"),
        ("~trainer.foo", "there is no key 'foo' in 'trainer'."),
        ("hydra.run.dirr=x", "there is no key 'dirr' in 'hydra.run'. Did you mean 'dir'?"),
        ("model.width=12", "model.width=12: expected a multiple of 8"),
        ("strategy.uneven_inputs=jion", "Did you mean 'join'?"),
        ("seed=1,2", "Add -m to run a job for each, or write a list as seed=[1,2]."),
        ("ckpt_path=nowhere.ckpt", "ckpt_path=nowhere.ckpt: there is no checkpoint"),
        ("model.lr=0.1", "It has: width, norm, dropout, learning_rate"),
        ("learning_rat=0.1", "Did you mean 'model.learning_rate'?"),
        ("trainer.epochs=2", "Did you mean 'min_epochs' or 'max_epochs'?"),
        ("mode=max", "Did you mean 'objective.mode'"),
        ("trainer/max_epochs=3", "Did you mean 'trainer.max_epochs'?"),
        (
            "model.hidden=3",
            "there is no key 'hidden' in 'model'. It has: width, norm, dropout, learning_rate,",
        ),
        ("trainer.strategy=ddp", "there is no key 'strategy' in 'trainer'. Did you mean 'strategy'?"),
        ("logger=wandbb", "Did you mean 'wandb'?"),
        ("a:b=c", "'a:b=c' cannot be read ("),
    ],
    [
        ("trainer.fast_dev_run=maybe", "expected a whole number or true or false."),
        ("precision=32", "group 'precision' has no option '32'. It has: 16-mixed, 16-true, 32-true,"),
        (
            "+callbacks.auto_batch_size.margn=0.1",
            "AutoBatchSize has no setting 'margn'. Did you mean 'margin'",
        ),
        (
            "+callbacks.auto_batch_sise.margin=0.1",
            "_target_, so no object can be created from it. Did you mean",
        ),
        ("data._target_=lightning_lockstep.demo.DigitData", "Did you mean 'DigitsData'?"),
        ("ckpt_path=last", "ckpt_path=last: no run under"),
        ("strategy=lockstep_ddp", "Did you mean 'ddp'? It has: ddp, "),
        ("trainer.precision=fp16", "'16-mixed'"),
        ("+trainer.strategy=ddp", "the group 'strategy' sets this: write strategy=..."),
        ("logger=false", "group 'logger' has no option 'False'. It has: "),
        ("trainer.max_epochs", "'trainer.max_epochs' cannot be read ("),
        ("trainer.max_steps=true", "expected a whole number."),
        (
            "trainer.limit_val_batches=many",
            "trainer.limit_val_batches=many: expected a ",
        ),  # `typing` chooses the order
    ],
    [
        ("precision=null", "group 'precision' has no option 'None'. It has: "),
        ("data._target_=no_such_module.Data", "cannot be imported. There is no module 'no_such_module'"),
        ("ckpt_path=3", "ckpt_path=3: expected text or null."),
        ("trainer.max_time=5", "trainer.max_time=5: expected text or null."),
        (
            "trainer.accumulate_grad_batches=0",
            "batches=0: expected micro-batches in an optimizer step, a whole",
        ),
        ("callbacks=EarlyStopping", "Did you mean 'early_stopping'?"),
        ("trainer.max_epochs=-5", "max_epochs"),
    ],
    [
        ("precision=fp16", "It has: 16-mixed, "),
        ("strategy=FSDP", "group 'strategy' has no option 'FSDP'. Did you mean 'fsdp'"),
        ("callbacks=ModelCheckpoint", "group 'callbacks' has no option 'ModelCheckpoint'."),
    ],
    [
        ("strategy=lockstep_xla_spmd", "Did you mean 'xla_spmd'?"),
        ("precision=bf16", "Did you mean 'bf16-true'?"),
        ("+callbacks=overflow", "is in the configuration already: write callbacks=overflow"),
    ],
]


@pytest.mark.parametrize("table", WRONG, ids=len)
def test_each_wrong_argument_is_one_fault_that_tells_what_is_right(
    table: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no earlier run is
    company = ["callbacks=auto_batch_size"] if any(".auto_batch_size." in a for a, _ in table) else []
    found = faults_of(*company, *(argument for argument, _ in table))
    for argument, expected in table:
        assert any(expected in fault for fault in found), (argument, found)
    assert len(found) == len(table), found


def test_the_newest_run_beside_this_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "outputs" / "train" / "earlier" / "checkpoints" / "last.ckpt"
    assert only(faults_of("ckpt_path=last")).startswith(f"ckpt_path=last: no run under {checkpoint.parents[2]}")
    checkpoint.parent.mkdir(parents=True)
    torch.save({"state_dict": {}}, checkpoint)
    assert faults_of("ckpt_path=last") == []
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: len(whole) // 2])
    assert only(faults_of("ckpt_path=last")).startswith(
        f"ckpt_path=last: expected a whole checkpoint, but {checkpoint} is truncated"
    )


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_place_in_which_no_folder_can_be_made_is_one_fault(key: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flag = ["-m"] if "sweep" in key else []
    fault = only(faults_of(*flag, f"{key}={tmp_path}/file/run"))
    assert fault.startswith(f"{key}={tmp_path}/file/run: no folder can be made there")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_this_machine_lacks_is_reported_by_the_key_that_asks_for_it() -> None:
    assert faults_of("trainer.accelerator=gpu") == ["trainer.accelerator=gpu: No supported gpu backend found!"]


def test_a_key_of_a_choice_that_is_not_taken_names_the_choice() -> None:
    fault = only(faults_of("callbacks.early_stopping.patience=3"))
    assert fault.endswith(" It comes with the option callbacks=early_stopping, which was not chosen.")
    assert faults_of("callbacks=early_stopping", "callbacks.early_stopping.patience=3") == []


def test_a_new_key_of_a_users_own_is_added() -> None:
    assert faults_of("++seeds=[1,2]", "++modle.width=3") == []
    assert faults_of("+wide.value=16", "+note=a", "model.width=${wide.value}", "hydra.job.name=${note}") == []


def test_overrides_on_both_sides_of_a_flag_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep-train", "seed=1,2", "-m", "trainer.devices=1"])
    assert faults_of(*sys.argv[1:]) == []
    assert sys.argv[1:] == ["seed=1,2", "trainer.devices=1", "-m"], "as Hydra's own parser takes them"


def test_what_constructors_object_to_is_reported_beside_values_of_a_wrong_type_each_by_its_key() -> None:
    assert faults_of("trainer.max_epochs=ten", "trainer.devices=0", "model.learning_rate=-1") == [
        "trainer.max_epochs=ten: expected a whole number or null.",
        "model.learning_rate=-1: expected a number, more than 0.",
        "trainer.devices=0: `Trainer(devices=0)` value is not a valid input using cpu accelerator.",
    ]
    assert faults_of("trainer.max_epochs=ten", "trainer.devices=two") == [
        "trainer.max_epochs=ten: expected a whole number or null.",
        "trainer.devices=two: `devices` selected with `CPUAccelerator` should be an int > 0.",
    ]
    three = ("trainer.devices=0", "trainer.max_steps=-5", "trainer.gradient_clip_algorithm=l2")
    assert [fault.split(":")[0] for fault in faults_of(*three)] == list(three)


def test_a_value_that_others_refer_to_is_reported_first_where_it_was_given() -> None:
    assert faults_of("seed=one")[0].startswith("seed=one: expected a whole number")
    assert faults_of("objective.mode=low") == ["objective.mode=low: expected 'min' or 'max'."]


def test_an_unresolvable_reference_and_a_missing_value_are_named() -> None:
    fault = only(faults_of("model.width=${data.context}"))
    assert "model.width: takes its value from ${data.context}, but this configuration has no such key" in fault
    assert only(faults_of("data.batch_size=???")) == "data.batch_size is required: add data.batch_size=..."
    key = "callbacks.effective_batch_size.global_batch_size"
    assert only(faults_of("callbacks=effective_batch_size")) == f"{key} is required: add {key}=..."


def test_the_global_batch_has_a_sample_for_each_rank_and_micro_batch() -> None:
    two = ("trainer.devices=2", "trainer.accumulate_grad_batches=2")
    assert faults_of("data.global_batch_size=35", *two) == []
    assert "expected at least 2 ranks x 2 accumulated micro-batches = 4" in only(
        faults_of("data.global_batch_size=3", *two)
    )
    assert "expected a multiple of trainer.accumulate_grad_batches=2 under strategy=single" in only(
        faults_of("data.global_batch_size=35", "strategy=single", two[1])
    )


def test_several_devices_need_a_strategy() -> None:
    fault = only(faults_of("strategy=single", "trainer.devices=2"))
    assert "several need strategy=ddp" in fault


def test_each_value_of_a_sweep_is_checked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "LONGEST_CHECK", 600.0)
    faults = faults_of("-m", "seed=1,2", "model.width=8,9,16", "data=digits,digit")
    assert len(faults) == 2
    assert faults[0].startswith("model.width=9: expected a multiple of 8")
    assert faults[1].startswith("data=digit: group 'data' has no option 'digit'.")
    monkeypatch.setattr(overrides, "LONGEST_CHECK", 0.0)
    assert faults_of("-m", "seed=range(1,65)", "model.width=8,9") == []


def test_the_jobs_of_a_sweep_check_the_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_pass", lambda *asked: False)
    assert "debug=preflight: the checks above" in only(faults_of("-m", "debug=preflight", "seed=1,2"))


def test_the_groups_of_a_users_own_folder_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: lightning_lockstep.demo.ConvNet\nwidht: 8\n")
    folder = ("--config-dir", str(tmp_path))
    assert "Did you mean 'mine'?" in only(faults_of(*folder, "model=mime"))
    assert (
        only(faults_of(*folder, "model=mine")) == "model.widht=8: ConvNet has no setting 'widht'. Did you mean 'width'?"
    )
    assert "there is no such folder" in only(faults_of("--config-dir", str(tmp_path / "no")))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "defaults: [lockstep_train, {override model: cn}]",
            "Did you mean 'cnn'? It has: byte_gpt, cnn, own.",
        ),
        ("defaults: [lockstep_trane]", "configs of this package need pkg://lightning_lockstep.conf there."),
        ("defaults:\n - lockstep_train\n a: 3", 'own.yaml", line 3, column 2'),
    ],
)
def test_a_file_that_cannot_be_used_is_one_fault(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(text)
    assert fault in only(faults_of("--config-dir", str(tmp_path), "--config-name", "own"))


def test_a_wrong_config_name_is_one_fault() -> None:
    assert "There is: lockstep_train." in only(faults_of("--config-name", "lockstep_trane"))


def test_a_missing_folder_of_the_primary_config_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "conf")
    with initialize_config_dir(folder, version_base=None), pytest.raises(MissingConfigException) as caught:
        compose("config")
    assert f"Check that the config directory '{folder}' exists" in overrides.whole_message(caught.value)


def test_the_message_in_the_docs_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "hydra.md").read_text()
    command, block = page.split("$ lockstep-train ")[1].split("```")[0].split("\n", 1)
    show_faults("lockstep-train", faults_of(*command.split()))
    assert block.split("\n", 1)[1] == capsys.readouterr().err


def test_the_message_numbers_the_faults_and_exceptions_are_shown_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_faults("lockstep-train", ["a=1: wrong.", "b=2: wrong\ntoo."])
    assert capsys.readouterr().err.splitlines() == [
        "lockstep-train: 2 errors in the configuration; nothing was started.",
        "",
        "  1. a=1: wrong.",
        "  2. b=2: wrong",
        "     too.",
        "",
        "HYDRA_FULL_ERROR=1 shows the exceptions behind this, if there are any.",
    ]
    faults_of("trainer.devices=0", "trainer.max_epochs=ten")
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    faults_of("trainer.devices=0", "trainer.max_epochs=ten")
    assert "MisconfigurationException: `Trainer(devices=0)`" in capsys.readouterr().err
