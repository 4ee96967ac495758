"""What is said about command lines that cannot be used."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from lightning_lockstep._application import overrides
from lightning_lockstep._application.values import Fault, show_faults
from lightning_lockstep.demo.images import ConvNet
from tests.common.application.command_lines import faults_of, look_at, only


def test_nothing_is_said_about_a_good_command_line_and_nothing_is_written() -> None:
    assert faults_of("strategy=ddp", "trainer.devices=2", "trainer.max_epochs=1", "seed=3") == []
    assert list(Path.cwd().iterdir()) == []


def test_a_wrong_group_choice_key_and_value_are_reported_together() -> None:
    choice, key, value = faults_of("strategy=dpp", "trainer.max_epochz=3", "data.batch_size=-1")
    assert choice.startswith("strategy=dpp: group 'strategy' has no option 'dpp'. Did you mean 'ddp'?")
    assert key.startswith(
        "trainer.max_epochz=3: there is no key 'max_epochz' in 'trainer'. Did you mean 'max_epochs'"
    )
    assert value == "data.batch_size=-1: expected samples per rank, a whole number from 1."


#: Wrong arguments with a part of what is said about each; those of a list are given together.
WRONG = [
    [
        ("stategy=ddp", "there is no key 'stategy' in the configuration. Did you mean 'strategy'"),
        ("max_epochs=3", "Did you mean 'trainer.max_epochs'?"),
        ("callbacks=[lr_monitr]", "no option 'lr_monitr'. Did you mean 'lr_monitor'"),
        ("precision=16-mixd", "Did you mean '16-mixed'"),
        ("trainer.precision=16-mixd", "Did you mean '16-mixed'"),
        ("trainer.max_epochs=abc", "expected a whole number or null, given the text 'abc'."),
        ("data.batch_size=abc", "expected a whole number, given the text 'abc'"),
        ("+data.foo=3", "DigitsData has no setting 'foo'."),
        ("+data.batch_sise=3", "DigitsData has no setting 'batch_sise'. Did you mean 'batch_size'"),
        ("trainer.plugins=x", "A new key is added with +trainer.plugins=x"),
        ("~trainer.foo", "there is no key 'foo' in 'trainer'."),
        ("hydra.run.dirr=x", "there is no key 'dirr' in 'hydra.run'. Did you mean 'dir'?"),
        ("model.width=12", "model.width=12: expected a multiple of 8"),
        ("strategy.uneven_inputs=jion", "Did you mean 'join'?"),
        ("strategy.grace_period=0", "more than 0"),
        ("seed=1,2", "Add -m to run a job for each, or write a list as seed=[1,2]."),
        ("ckpt_path=nowhere.ckpt", "ckpt_path=nowhere.ckpt: there is no checkpoint"),
        ("model.lr=0.1", "Did you mean 'learning_rate'?"),
        ("lr=0.1", "Did you mean 'model.learning_rate'?"),
        ("gpus=2", "Did you mean 'trainer.devices'?"),
        ("trainer.epochs=2", "Did you mean 'max_epochs'?"),
        ("mode=max", "Did you mean 'objective.mode'"),
        ("resume=last", "Did you mean 'ckpt_path'?"),
        ("trainer/max_epochs=3", "Did you mean 'trainer.max_epochs'?"),
        ("model.hidden=3", "there is no key 'hidden' in 'model'. It has: width, num_classes,"),
        ("trainer.strategy=ddp", "the group 'strategy' decides this. Did you mean 'strategy=ddp'?"),
        ("logger=wandb_logger", "Did you mean 'wandb'?"),
        ("objective=val_acc", "Give a value to one of them, such as objective.metric=..."),
        ("a:b=c", "'a:b=c' cannot be read as key=value"),
    ],
    [
        ("trainer.fast_dev_run=maybe", "expected a whole number or true or false"),
        ("precision=16", "group 'precision' has no option '16'. Did you mean"),
        (
            "+callbacks.auto_batch_size.margn=0.1",
            "AutoBatchSize has no setting 'margn'. Did you mean 'margin'",
        ),
        ("callbacks.auto_batch_size.max_trials=many", "expected a whole number, given the text 'many'."),
        ("data._target_=lightning_lockstep.demo.DigitData", "Did you mean 'DigitsData'?"),
        ("ckpt_path=last", "ckpt_path=last: no run under"),
        ("strategy=lockstep_ddp", "Did you mean 'ddp'?"),
        ("trainer.precision=fp16", "Did you mean '16-mixed'?"),
        ("+trainer.strategy=ddp", "the group 'strategy' decides this. Did you mean 'strategy=ddp'?"),
        ("logger=false", "Did you mean 'none'?"),
        ("trainer.max_epochs", "Give it a value: trainer.max_epochs=..."),
    ],
    [
        ("precision=null", "expected an option of group 'precision': 16-mixed,"),
        ("data._target_=no_such_module.Data", "cannot be imported. There is no module 'no_such_module'"),
        ("ckpt_path=3", "ckpt_path=3: expected text or null."),
        ("strategy=ddp_find_unused_parameters_true", "Did you mean 'ddp'?"),
        ("callbacks=EarlyStopping", "Did you mean 'early_stopping'?"),
        ("trainer.max_epochs=-5", "max_epochs"),
    ],
    [
        ("strategy=LockstepDDPStrategy", "Did you mean 'ddp'?"),
        ("precision=fp16", "Did you mean '16-mixed'?"),
        ("callbacks=ModelCheckpoint", "Did you mean 'checkpoint=best'?"),
    ],
    [
        ("strategy=LockstepXLASPMDStrategy", "Did you mean 'xla_spmd'?"),
        ("precision=bf16", "Did you mean 'bf16-mixed'?"),
        ("+callbacks=overflow", "has an option already. Write callbacks=overflow, which takes its place."),
    ],
    [
        ("strategy=lockstep_fsdp", "Did you mean 'fsdp'?"),
    ],
    [
        ("strategy=auto", "Did you mean 'single'?"),
    ],
    [
        ("strategy=null", "Did you mean 'single'?"),
    ],
]


@pytest.mark.parametrize("table", WRONG, ids=len)
def test_each_wrong_argument_is_one_fault_that_tells_what_is_right(table: list[tuple[str, str]]) -> None:
    company = ["callbacks=auto_batch_size"] if any(".auto_batch_size." in a for a, _ in table) else []
    found = faults_of(*company, *(argument for argument, _ in table))
    for argument, expected in table:
        assert any(expected in fault for fault in found), (argument, found)
    assert len(found) == len(table), found


def test_a_key_of_a_choice_that_is_not_taken_names_the_choice() -> None:
    ending = " It comes with the option callbacks=early_stopping: give that too."
    there, *others = faults_of(
        *(
            "callbacks.early_stopping.patience=3",
            "callbacks.patience=3",
            "early_stopping.patience=3",
            "patience=3",
        )
    )
    assert there.endswith(ending) and "Did you mean" not in there
    for fault in others:
        assert fault.endswith(f" Did you mean 'callbacks.early_stopping.patience'?{ending}"), fault
    assert faults_of("callbacks=early_stopping", "callbacks.early_stopping.patience=3") == []


def test_arguments_in_other_forms_are_refused() -> None:
    assert faults_of("--max_epochs=1", "trainer.max_epochs", "1") == [
        "--max_epochs=1: there is no such flag. A setting is written key=value, without dashes.",
        "'trainer.max_epochs' cannot be read as key=value (Error parsing override 'trainer.max_epochs')."
        " Give it a value: trainer.max_epochs=...",
        "'1' cannot be read as key=value (LexerNoViableAltException: 1). A setting is written key=value.",
    ]


def test_overrides_on_both_sides_of_a_flag_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep-train", "seed=1,2", "-m", "trainer.devices=1"])
    assert faults_of(*sys.argv[1:]) == []
    assert sys.argv[1:] == ["seed=1,2", "trainer.devices=1", "-m"], "as Hydra's own parser takes them"


def test_what_constructors_object_to_is_reported_beside_values_of_a_wrong_type_each_by_its_key() -> None:
    assert faults_of("trainer.max_epochs=ten", "trainer.devices=0", "model.learning_rate=-1") == [
        "trainer.max_epochs=ten: expected a whole number or null, given the text 'ten'.",
        "trainer.devices=0: `Trainer(devices=0)` value is not a valid input using cpu accelerator.",
        "model.learning_rate=-1: expected a number, more than 0.",
    ]
    three = ("trainer.devices=0", "trainer.max_steps=-5", "trainer.gradient_clip_algorithm=l2")
    assert [fault.split(":")[0] for fault in faults_of(*three)] == list(three)


def test_a_value_that_others_refer_to_is_reported_first_where_it_was_given() -> None:
    assert faults_of("seed=one")[0].startswith("seed=one: expected a whole number")
    assert faults_of("objective.mode=low")[0] == "objective.mode=low: expected min or max."


def test_what_cannot_be_parsed_is_reported_beside_the_rest() -> None:
    key, syntax = faults_of("data.batch=1", "a b=c")
    assert "did you mean 'batch_size'" in key.lower()
    assert "cannot be read as key=value" in syntax


def test_an_unresolvable_reference_and_a_missing_value_are_named() -> None:
    fault = only(faults_of("model.width=${data.context}"))
    assert (
        "model.width: takes its value from ${data.context}, and this configuration has no such key" in fault
    )
    assert only(faults_of("data.batch_size=???")) == "data.batch_size is required: add data.batch_size=..."


def test_the_global_batch_has_a_sample_for_each_rank_and_micro_batch() -> None:
    two = ("trainer.devices=2", "trainer.accumulate_grad_batches=2")
    assert faults_of("data.global_batch_size=35", *two) == []
    assert "expected at least 2 ranks x 2 accumulated micro-batches = 4" in only(
        faults_of("data.global_batch_size=3", *two)
    )
    assert "expected a multiple of trainer.accumulate_grad_batches=2 under strategy=single" in only(
        faults_of("data.global_batch_size=35", "strategy=single", two[1])
    )


def test_a_model_that_takes_other_samples_than_the_data_yields_is_named_with_those_that_fit() -> None:
    assert (
        "model=cnn does not fit data=source_text: the model takes images with a class each; the data are windows of"
        " bytes. Take model=byte_gpt or data=digits."
    ) in faults_of("data=source_text")


def test_a_model_that_does_not_say_what_it_takes_is_not_judged() -> None:
    # torch's own, and a subclass of ours that takes more than its parent
    for target in ("torch.nn.Identity", f"{__name__}.Versatile"):
        assert faults_of("data=source_text", "~model", f"+model._target_={target}") == []
    assert faults_of("data=source_text", "~model", f"+model._target_={__name__}.Heir") != []


class Heir(ConvNet):
    """Takes what its parent takes."""


class Versatile(ConvNet):
    """Takes samples of any kind."""

    takes = None


def test_several_devices_need_a_strategy() -> None:
    fault = only(faults_of("strategy=single", "trainer.devices=2"))
    assert "several need strategy=ddp" in fault


def test_each_value_of_a_sweep_is_checked_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overrides, "LONGEST_CHECK", 600.0)
    faults = faults_of("-m", "seed=1,2", "model.width=8,9,16", "data=digits,digit")
    assert len(faults) == 2
    assert faults[0].startswith("model.width=9: expected a multiple of 8")
    assert faults[1].startswith("data=digit: group 'data' has no option 'digit'.")
    monkeypatch.setattr(overrides, "LONGEST_CHECK", 0.0)
    assert look_at("-m", "seed=range(1,65)", "model.width=8,9").faults == []
    assert "checked 2 of the 66 values of the sweep" in capsys.readouterr().err


def test_choices_that_are_numbers_are_quoted_for_hydra() -> None:
    found = look_at("-m", "precision=32,bf16-mixed,64", "seed=1,2", "trainer=default")
    assert found[:2] == ([], {"precision=32,bf16-mixed,64": "precision='32',bf16-mixed,'64'"})
    assert look_at("precision=64").quoted == {"precision=64": "precision='64'"}


def test_the_groups_of_a_users_own_folder_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: lightning_lockstep.demo.ConvNet\nwidht: 8\n")
    folder = ("--config-dir", str(tmp_path))
    assert "Did you mean 'mine'?" in only(faults_of(*folder, "model=mime"))
    assert (
        only(faults_of(*folder, "model=mine"))
        == "model.widht=8: ConvNet has no setting 'widht'. Did you mean 'width'?"
    )
    assert "there is no such folder" in only(faults_of("--config-dir", str(tmp_path / "no")))


def test_a_file_that_is_no_yaml_is_a_fault_with_its_place_where_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "broken.yaml").write_text("a: [1\nb: 2\n")
    folder = ("--config-dir", str(tmp_path))
    assert "model/broken.yaml" in only(faults_of(*folder, "model=broken"))
    assert "Did you mean 'width'?" in only(faults_of(*folder, "model.widht=8"))


def test_a_choice_that_has_to_be_taken_is_a_fault_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "open.yaml").write_text("defaults:\n  - lockstep_train\n  - override model: ???\n")
    arguments = ("--config-dir", str(tmp_path), "--config-name", "open")
    assert "You must specify 'model'" in only(faults_of(*arguments))
    assert faults_of(*arguments, "model=cnn") == []


def test_a_wrong_config_name_is_one_fault() -> None:
    assert "There is: lockstep_train." in only(faults_of("--config-name", "lockstep_trane"))


def test_the_message_numbers_the_faults_and_shows_exceptions_on_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    faults = [Fault("a=1: wrong."), Fault("b=2: wrong\ntoo.", ValueError("deep inside"))]
    show_faults("lockstep-train", faults, stack_traces=False)
    assert capsys.readouterr().err.splitlines() == [
        "lockstep-train: 2 errors in the configuration; nothing was started.",
        "",
        "  1. a=1: wrong.",
        "  2. b=2: wrong",
        "     too.",
        "",
        "HYDRA_FULL_ERROR=1 shows the exceptions behind this.",
    ]
    show_faults("lockstep-train", faults, stack_traces=True)
    shown = capsys.readouterr().err
    assert shown.index("ValueError: deep inside") < shown.index("1. a=1: wrong.")
    assert "HYDRA_FULL_ERROR" not in shown


def test_the_check_leaves_what_is_logged_as_it_was() -> None:
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        assert faults_of("trainer.max_epochs=ten", "trainer.devices=0")
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(before)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("trainer.num_nodes=1",), ""),
        (
            ("trainer.num_nodes=2",),
            "does not match the world size (2). Leave out trainer.devices and trainer.num_nodes, or start as",
        ),
        (
            ("trainer.devices=2", "trainer.num_nodes=2"),
            "the product (2 * 2) does not match the world size (2).",
        ),
    ],
)
def test_other_numbers_of_nodes_and_devices_than_were_started(
    arguments: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {
        **torchrun,
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    found = faults_of("strategy=ddp", *arguments)
    assert expected in only(found) if expected else found == []


def test_other_tasks_of_srun_than_the_trainer_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    fault = only(faults_of("strategy=ddp", "trainer.devices=2", "trainer.num_nodes=2"))
    assert fault.startswith("The Trainer and srun disagree about the ranks:")
    assert "ask Slurm for --nodes=2 --ntasks-per-node=2" in fault
