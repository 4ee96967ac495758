"""LightningCLI: every strategy and callback by class path and by name, and from `--print_config` back."""

from __future__ import annotations

import json
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

REQUIRED = {"EffectiveBatchSize": {"global_batch_size": 8}, "SyncedEarlyStopping": {"monitor": "val_loss"}}
# Options of each kind of value that a file can hold: a choice, numbers, a function, an object, lists, dictionaries.
OPTIONS: dict[str, dict[str, Any]] = {
    "LockstepDDPStrategy": {
        "uneven_inputs": "join",
        "timeout": 90.0,
        "ddp_comm_hook": "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook",
        "cluster_environment": {"class_path": "lightning.fabric.plugins.environments.LightningEnvironment"},
        "checkpoint_io": {"class_path": "lightning.fabric.plugins.TorchCheckpointIO"},
        "bucket_cap_mb": 10.0,
        "find_unused_parameters": True,
        "start_method": "spawn",
    },
    "LockstepMPIStrategy": {"hostfile": "hosts", "mpirun_args": ["-v"], "ddp_comm_hook": "fp16_compress"},
    "LockstepDeepSpeedStrategy": {"config": {"gradient_clipping": 1.0}, "stage": 3, "offload_param": "cpu"},
    "LockstepFSDPStrategy": {"shard": ["Block"], "mesh": {"shard": 1, "replicate": 1}, "offload": "cpu"},
    "LockstepXLASPMDStrategy": {"parameters": "fsdp", "patterns": ["*.weight"]},
    "AutoBatchSize": {"memory_limit": "2GiB", "global_batch_size": 32, "on_oom": "split"},
    "EffectiveBatchSize": {"global_batch_size": 8, "lr_scaling": "sqrt", "reference_batch_size": 16},
    "FP32Modules": {"modules": ["decoder.*"]},
    "OverflowDetector": {"trace_batch_nums": [1, 2], "report_dir": "reports", "scale_floor": 2.0},
    "StaticShapes": {
        "lengths": [4, 8],
        "pad_values": {"tokens": 1.0, 0: 2.0},
        "ignored": {"labels": -100.0, 1: 0.0},
        "batch_size": "train",
    },
    "StopTogether": {"signals": ["SIGTERM"], "exit_code": None, "stop_file": "stop"},
    "SyncedEarlyStopping": {"monitor": "val_loss", "reduce": "max", "missing": "use_present"},
}
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


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_by_its_path_and_its_options_come_back_from_the_printed_configuration(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = OPTIONS.get(name, {})
    back = printed(written(name, given), capsys)
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
    options = [f"--trainer.callbacks.{key}={json.dumps(value)}" for key, value in REQUIRED.get(name, {}).items()]
    made_by(cli([f"--trainer.callbacks+={name}", *options, "--trainer.logger=false"]), name)


@pytest.mark.parametrize("name", ["LockstepDDPStrategy", "LockstepMPIStrategy", "LockstepDeepSpeedStrategy"])
def test_a_misspelt_option_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(written(name, {"grace_perid": 5.0}))
    assert "'grace_perid' is not accepted" in capsys.readouterr().err
