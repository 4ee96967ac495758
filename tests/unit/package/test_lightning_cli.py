"""LightningCLI: every strategy and callback by class path and by name, and from `--print_config` back."""

from __future__ import annotations

import inspect
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_lockstep
from lightning_lockstep import callbacks, strategies
from lightning_lockstep._lightning import StrategyRegistry
from lightning_lockstep.callbacks import *  # noqa: F403 # LightningCLI finds a class by its short name once imported
from lightning_lockstep.strategies.options import OptionsOfDDP, options_of_ddp

ENVIRONMENT = {"class_path": "lightning.fabric.plugins.environments.LightningEnvironment"}
CHECKPOINT_IO = {"class_path": "lightning.fabric.plugins.TorchCheckpointIO"}
PRECISION = {"class_path": "lightning.pytorch.plugins.Precision"}
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"

PLUGINS = {
    "cluster_environment": ENVIRONMENT,
    "accelerator": {"class_path": "lightning.pytorch.accelerators.CPUAccelerator"},
    "precision_plugin": PRECISION,
}
LIFE_CYCLE = {
    "grace_period": 5.0,
    "silence_limit": 60.0,
    "uneven_inputs": "join",
    "iterable_datasets": "shard",
    "random_numbers": "of_sample",
    "batch_norm": "of_batch",
    "threads_per_rank": 2,
    "timeout": 90.0,
    "guard": "off",
    "stall_timeout": 30.0,
}
DDP = {
    **LIFE_CYCLE,
    "ddp_comm_hook": f"{HOOKS}.fp16_compress_hook",
    "gradient_as_bucket_view": False,
    **PLUGINS,
    "checkpoint_io": CHECKPOINT_IO,
    "ddp_comm_wrapper": f"{HOOKS}.bf16_compress_wrapper",
    "model_averaging_period": 4,
    "dim": 1,
    "broadcast_buffers": False,
    "init_sync": False,
    "bucket_cap_mb": 10.0,
    "find_unused_parameters": True,
    "check_reduction": True,
    "static_graph": True,
    "skip_all_reduce_unused_params": True,
    "bucket_cap_mb_list": [1, 2],
    "batched_grad_copy": True,
    "forward_sync_buffers": False,
    "lazy_bucket_allocation": True,
}
# Each option of each class once, with another value than its default.
OPTIONS: dict[str, dict[str, Any]] = {
    "LockstepDDPStrategy": {
        **DDP,
        "start_method": "spawn",
        "process_group_backend": "gloo",
        "on_lost_rank": "continue",
        "least_ranks": 2,
    },
    "LockstepMPIStrategy": {
        **DDP,
        "ddp_comm_hook": "fp16_compress",
        "backend": "gloo",
        "hostfile": "hosts",
        "mpirun": "mpirun",
        "mpirun_args": ["-v"],
        "ssh_args": ["-p", "2222"],
    },
    "LockstepDeepSpeedStrategy": {
        **LIFE_CYCLE,
        "config": {"gradient_clipping": 1.0},
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_param": "cpu",
        "nvme_path": "scratch",
        "adapt": True,
        "exclude_frozen_parameters": True,
        **PLUGINS,
        "start_method": "popen",
        "process_group_backend": "gloo",
    },
    "LockstepFSDPStrategy": {
        **LIFE_CYCLE,
        "shard": ["Block"],
        "reshard_after_forward": False,
        "offload": "cpu",
        "mesh": {"shard": 1, "replicate": 1},
        "activation_checkpointing": True,
        "reduce_dtype": "compute",
        "state_dict": "sharded",
        **PLUGINS,
        "start_method": "popen",
        "process_group_backend": "gloo",
    },
    "LockstepXLAStrategy": {
        **LIFE_CYCLE,
        "random_numbers": "of_rank",  # other values are refused there
        "batch_norm": "of_rank",
        "downcast_bf16": True,
        "cluster_environment": ENVIRONMENT,
        "checkpoint_io": CHECKPOINT_IO,
        "precision_plugin": PRECISION,
    },
    "LockstepXLASPMDStrategy": {
        "parameters": "fsdp",
        "min_size": 1000,
        "patterns": ["*.weight"],
        "downcast_bf16": True,
        "checkpoint_io": CHECKPOINT_IO,
        "precision_plugin": PRECISION,
    },
    "AutoBatchSize": {
        "mode": "off",
        "steps_per_trial": 3,
        "init_val": 4,
        "max_trials": 5,
        "batch_arg_name": "size",
        "margin": 0.1,
        "max_val": 64,
        "memory_limit": "2GiB",
        "global_batch_size": 32,
        "on_oom": "split",
        "loss_reduction": "sum",
    },
    "ConsolidateCheckpoints": {"dtype": "as_saved"},
    "EffectiveBatchSize": {
        "global_batch_size": 8,
        "batch_arg_name": "size",
        "lr_scaling": "sqrt",
        "reference_batch_size": 16,
    },
    "FP32Modules": {"modules": ["decoder.*"]},
    "OverflowDetector": {
        "max_frames_to_save": 3,
        "trace_batch_nums": [1, 2],
        "abort_after_batch_num": 5,
        "mode": "hooks",
        "action": "warn",
        "gradients": False,
        "allow_inf": ["mask"],
        "modules": ["decoder"],
        "report_dir": "reports",
        "max_skips": 2,
        "check_every_n_steps": 3,
        "scale_floor": 2.0,
        "timeout": 10.0,
    },
    "RankOrderedLogging": {
        "level": "DEBUG",
        "files": "json",
        "folder": "logs",
        "order_timeout": 1.0,
    },
    "ReplicaCheck": {
        "every_n_steps": 5,
        "action": "warn",
        "optimizer_state": False,
        "buffers": "all",
        "data": False,
        "audit_every_n_steps": 50,
    },
    "StaticShapes": {
        "lengths": [4, 8],
        "pad_values": {"tokens": 1.0, 0: 2.0},
        "ignored": {"labels": -100.0, 1: 0.0},
        "dim": 2,
        "batch_size": "train",
    },
    "StopTogether": {
        "signals": ["SIGTERM"],
        "stop_file": "stop",
        "exit_code": None,
        "dirpath": "saved",
        "filename": "stopped",
    },
    "StragglerMonitor": {"every_n_steps": 5, "min_share": 0.2},
    "SyncedEarlyStopping": {
        "monitor": "val_loss",
        "min_delta": 0.1,
        "patience": 4,
        "verbose": True,
        "mode": "max",
        "strict": False,
        "check_finite": False,
        "stopping_threshold": 1.0,
        "divergence_threshold": -2.0,
        "check_on_train_epoch_end": False,
        "log_rank_zero_only": True,
        "reduce": "max",
        "missing": "use_present",
    },
}
# Of which no text of a file makes one.
OBJECTS = {
    "ddp_comm_state",
    "parallel_devices",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "mixed_precision",
    "device_mesh",
}
FORMER = {"effective_batch_size"}
REQUIRED = {"EffectiveBatchSize": {"global_batch_size": 8}, "SyncedEarlyStopping": {"monitor": "val_loss"}}
# Torch-xla is looked for when a Trainer is made, so these are made without one.
XLA = {"LockstepXLAStrategy", "LockstepXLASPMDStrategy"}
CLASSES = sorted({*strategies.__all__, *callbacks.__all__})


class CLI(LightningCLI):
    def instantiate_classes(self) -> None:
        chosen = self.config["trainer"]["strategy"]
        if not isinstance(chosen, str) and chosen["class_path"].rpartition(".")[2] in XLA:
            self.made = self.parser.instantiate_classes(self.config)["trainer"]["strategy"]
            return
        super().instantiate_classes()
        self.made = self.trainer.strategy


def cli(args: list[str]) -> CLI:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", *args])
        return CLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False)


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of how Lightning calls it
    Path("hosts").write_text("localhost slots=1\n")


def printed(args: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `--print_config` gives; it stands in config.yaml afterwards."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli([*args, "--print_config"])
    text = capsys.readouterr().out
    assert ended.value.code in (None, 0)
    Path("config.yaml").write_text(text)
    trainer = yaml.safe_load(text)["trainer"]
    chosen: dict[str, Any] = trainer["strategy"] if trainer["callbacks"] is None else trainer["callbacks"][0]
    return chosen


def written(name: str, init_args: dict[str, Any]) -> list[str]:
    """A config file that has the class by its path, and the arguments that take it."""
    chosen = {"class_path": f"lightning_lockstep.{name}", "init_args": init_args}
    entry = {"strategy": chosen} if name in strategies.__all__ else {"callbacks": [chosen]}
    trainer = {"devices": 1, "logger": False, "enable_progress_bar": False, **entry}
    Path("given.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    return ["--config=given.yaml"]


def made_by(made: CLI, name: str) -> Any:
    cls = getattr(lightning_lockstep, name)
    if name in strategies.__all__:
        assert type(made.made) is cls
        return made.made
    (callback,) = (one for one in made.trainer.callbacks if type(one) is cls)
    return callback


def options_of(name: str) -> set[str]:
    """The names that a user can type: those of the signature, and those of the options that it hands on."""
    maker = getattr(lightning_lockstep, name).__init__
    found = {parameter.name for parameter in list(inspect.signature(maker).parameters.values())[1:]}
    if "options" in found:
        (handed_on,) = typing.get_args(typing.get_type_hints(maker)["options"])
        found = found - {"options"} | handed_on.__optional_keys__
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_each_option_comes_back_from_the_printed_configuration(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {*OPTIONS[name]} == options_of(name) - OBJECTS - FORMER, "an option is not in the table"
    # An older torch lacks some of those that are handed on.
    lacking = OptionsOfDDP.__optional_keys__ - options_of_ddp()
    given = {key: value for key, value in OPTIONS[name].items() if key not in lacking}
    args = written(name, given)
    back = printed(args, capsys)
    assert back["class_path"] == f"lightning_lockstep.{name}"
    assert {key: back["init_args"][key] for key in given} == given
    made = made_by(cli(["--config=config.yaml"]), name)
    values = {key: plain(value) for key, value in vars(getattr(made, "settings", made)).items()}
    hook = values.pop("ddp_comm_hook", None)
    assert getattr(hook, "__name__", hook) in (None, "fp16_compress", "fp16_compress_hook")
    held = {key: value for key, value in given.items() if key in values and not _is_made(value)}
    assert {key: values[key] for key in held} == held


def _is_made(value: object) -> bool:
    """Whether LightningCLI makes an object of it."""
    return isinstance(value, dict) and "class_path" in value


@pytest.mark.parametrize(
    "name", [name for name in StrategyRegistry if name.startswith("lockstep") and "xla" not in name]
)
def test_a_strategy_by_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = [f"--trainer.strategy={name}", "--trainer.devices=1", "--trainer.logger=false"]
    assert printed(args, capsys) == name
    assert type(cli(["--config=config.yaml"]).made).__name__ in strategies.__all__


@pytest.mark.parametrize("name", sorted(callbacks.__all__))
def test_a_callback_by_its_name(name: str) -> None:
    options = [
        f"--trainer.callbacks.{key}={json.dumps(value)}" for key, value in REQUIRED.get(name, {}).items()
    ]
    made_by(cli([f"--trainer.callbacks+={name}", *options, "--trainer.logger=false"]), name)


@pytest.mark.parametrize("name", ["LockstepDDPStrategy", "LockstepMPIStrategy", "LockstepDeepSpeedStrategy"])
def test_a_misspelt_option_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(written(name, {"grace_perid": 5.0}))
    assert "'grace_perid' is not accepted" in capsys.readouterr().err
