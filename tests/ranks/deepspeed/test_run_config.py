"""What DeepSpeed gets in each run of a Trainer: in a fit, in evaluations, and before a module has its layers."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import hydra.utils
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException

from lightning_lockstep import ConfigurationError
from lightning_lockstep._lightning import Trainer
from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed.config_per_run import RunConfig, with_module_optimizer
from tests.harness import run_ranks
from tests.models.deepspeed.example_configs import OF_TRANSFORMERS
from tests.models.deepspeed.run_config import AUTO_LR, MadeLater, Net, config_of, loader, trainer

# -- what a module makes ---------------------------------------------------------------------------------


def filled(config: dict[str, Any], returned: Any, steps: float = 500) -> dict[str, Any]:
    module = SimpleNamespace(configure_optimizers=lambda: returned)
    faults = Faults()
    runner = SimpleNamespace(lightning_module=module, estimated_stepping_batches=steps)
    found = with_module_optimizer(config, runner, faults)
    faults.raise_all()
    return found


AUTO = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}}


def test_open_settings_are_filled_from_what_the_module_makes_in_every_form() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], 0.5, betas=(0.8, 0.9))
    for returned in (optimizer, [optimizer], {"optimizer": optimizer}, ([optimizer], [])):
        found = filled({"optimizer": AUTO}, returned)["optimizer"]
        assert found == {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.8, 0.9], "torch_adam": True}}
    config = copy.deepcopy(OF_TRANSFORMERS["accelerate-zero-3"])
    scheduler = filled(config, optimizer)["scheduler"]["params"]
    assert scheduler == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.5,
        "warmup_num_steps": 1,
        "total_num_steps": 500,
    }


@pytest.mark.parametrize(
    ("config", "steps", "key"),
    [
        ({"optimizer": {"type": "Adam", "params": {"momentum": "auto"}}}, 5, "optimizer.params.momentum"),
        ({"scheduler": {"params": {"total_num_steps": "auto"}}}, -1, "scheduler.params.total_num_steps"),
        ({"scheduler": {"params": {"warmup_max_lr": "auto"}}}, 5, "scheduler.params.warmup_max_lr"),
    ],
)
def test_an_auto_that_nobody_can_fill_is_refused(config: dict[str, Any], steps: int, key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key}='auto': neither configure_optimizers nor the Trainer"):
        filled(config, None, steps)


@pytest.mark.parametrize(
    ("config", "scheduler", "expected"),
    [
        ({"optimizer": {"type": "Adam", "params": {"lr": 0.5, "betas": [0.9, 0.999]}}}, False, ""),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}},
            False,
            "optimizer.params.lr=0.1 in the config and lr=0.5 of configure_optimizers: expected one of the two, or",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.01}}},
            False,
            "optimizer.params.weight_decay=0.01 in the config and weight_decay=0.0 of",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.5}}},
            True,
            "optimizer.type='Adam' in the config and a StepLR of configure_optimizers: expected",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            True,
            "scheduler.type='WarmupLR' in the config and a StepLR of configure_optimizers: expected",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, False, ""),
    ],
    ids=str,
)
def test_an_optimizer_beside_that_of_the_config(config: dict[str, Any], scheduler: bool, expected: str) -> None:
    groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    groups[1]["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(groups, 0.5, weight_decay=0.01)
    made: Any = ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if scheduler else [])
    said = ""
    try:
        filled(config, made)
    except ConfigurationError as error:
        said = str(error)
    assert said.startswith(expected) and bool(said) is bool(expected)


# -- without a run -----------------------------------------------------------------------------------------


def test_batch_sizes_of_a_fit_do_not_bind_evaluations() -> None:
    given = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 2}}
    assert RunConfig(given, adapt=False, say=print).of_evaluation("32-true")["train_batch_size"] == 1
    with pytest.raises(ConfigurationError, match=r"bf16\.enabled=True in the config and precision='32-true'"):
        RunConfig({**given, "bf16": {"enabled": True}}, adapt=False, say=print).of_evaluation("32-true")


def precision_of_program(*overrides: str) -> str:
    """The precision of the Trainer that `lockstep-train` makes for these arguments."""
    with initialize_config_module("lightning_lockstep.conf", version_base="1.3"):
        fixed = ["trainer.accelerator=cpu", "trainer.devices=1", "trainer.default_root_dir=null"]
        config = compose("lockstep_train", [*fixed, *overrides])
    strategy = hydra.utils.instantiate(config.strategy, _convert_="all")
    made = hydra.utils.instantiate(config.trainer, strategy=strategy, logger=False)
    return str(made.precision)


def test_lockstep_train_gives_the_trainer_no_precision_unless_the_user_does(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    line = ["strategy=deepspeed_stage_2", f"strategy.config={path}"]
    assert precision_of_program(*line) == precision_of_program(*line, "precision=bf16-mixed") == "bf16-mixed"
    for given in ("precision=32-true", "trainer.precision=32"):
        clash = r"bf16\.enabled=True in the config and precision='32-true' of the Trainer"
        with pytest.raises(InstantiationException, match=clash):
            precision_of_program(*line, given)


def test_contradictions_and_what_deepspeed_refuses_are_said_together(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"bf16": {"enabled": True, "imediate": 1}, "gradient_clippin": 1.0}))
    with pytest.raises(InstantiationException) as caught:
        precision_of_program("strategy=deepspeed_stage_2", f"strategy.config={path}", "precision=32-true")
    assert isinstance(caught.value.__cause__, ConfigurationError)
    expected = (
        "bf16.enabled=True in the config and precision='32-true' of the Trainer",
        "bf16.imediate=1: DeepSpeed has no such key in this section.",
        "gradient_clippin: DeepSpeed has no such key at the top level. Did you mean 'gradient_clipping'",
    )
    found = caught.value.__cause__.faults
    assert len(found) == 3 and all(map(str.startswith, found, expected)), found


def test_a_config_in_place_of_that_of_a_choice_keeps_its_stage_and_offloading(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"gradient_clipping": 1.0}))
    with initialize_config_module("lightning_lockstep.conf", version_base="1.3"):
        choice = compose("lockstep_train", ["strategy=deepspeed_stage_3_offload", f"strategy.config={path}"])
    zero = hydra.utils.instantiate(choice.strategy, _convert_="all").config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"], zero["offload_param"]) == (3, *2 * [{"device": "cpu"}])
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    with pytest.raises(InstantiationException, match=r"zero_optimization\.stage=2 in the config and stage=3"):
        hydra.utils.instantiate(choice.strategy, _convert_="all")


# -- in runs ---------------------------------------------------------------------------------------------


def single_fits() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def fit(name: str, config: dict[str, Any], net: Net | None = None, **options: Any) -> Trainer:
        runner = trainer(config, devices=1, **options)
        try:
            runner.fit(net or Net(), loader())
            found[name] = "fitted"
        except ConfigurationError as error:
            found[name] = str(error)
        return runner

    schedule = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}}
    accumulating = {"gradient_accumulation_steps": 3, "scheduler": schedule}
    runner = fit("steps", accumulating, max_epochs=2, accumulate_grad_batches=1)  # as our program gives it
    found["steps"] = runner.global_step, config_of(runner)["scheduler"]["params"]
    stage_3 = {"optimizer": AUTO_LR, "zero_optimization": {"stage": 3}}
    fit("made later", stage_3, MadeLater())
    fit("two schedulers", {"scheduler": schedule}, Net("StepLR"))
    fit("scheduler of an unused optimizer", {"optimizer": AUTO_LR}, Net("StepLR"))
    fixed = {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}
    fit("two learning rates", {"optimizer": fixed})
    import deepspeed

    found["probed"] = "__compatible_ops__" in vars(deepspeed.ops)
    fit("nulls", {"optimizer": None, "fp16": None, "scheduler": None, "compile": None})
    return found


def test_optimizers_schedulers_and_steps_of_real_fits() -> None:
    (found,) = run_ranks(1, single_fits, timeout=120)
    steps, params = found["steps"]
    assert steps == 6 and params == {"warmup_max_lr": 0.02, "total_num_steps": 6}
    assert not found["probed"], "DeepSpeed has looked for the compilers of all its operations"
    assert found["made later"] == found["nulls"] == "fitted"
    for name in ("two schedulers", "scheduler of an unused optimizer"):
        assert "a StepLR of configure_optimizers: expected optimizer and scheduler in one" in found[name]
    assert "optimizer.params.lr=0.001 in the config and lr=0.02" in found["two learning rates"]
