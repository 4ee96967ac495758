"""The configuration that every rank gets."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from lightning_lockstep.launchers import hydra
from lightning_lockstep.launchers.hydra import for_other_ranks, freeze, hydra_child_command, without_hydra
from lightning_lockstep.launchers.mpirun import config_for_all_hosts


@dataclass
class Part:
    size: int = 3


@dataclass
class Whole:
    part: Part = field(default_factory=Part)
    again: Any = "${part}"
    twice: int = "${part.size}"  # type: ignore[assignment]
    stamp: str = "${now:%f}"
    later: int = "???"  # type: ignore[assignment]
    depends: int = "${later}"  # type: ignore[assignment]
    secret: str = "${oc.env:LOCKSTEP_TEST_NOT_SET}"
    many: list[Any] = field(default_factory=lambda: [1, {"deep": "${part.size}"}])


@pytest.fixture(scope="module", autouse=True)
def resolvers() -> None:
    """Hydra's own, such as `now`."""
    setup_globals()


@pytest.fixture
def job() -> Any:
    """A composed configuration with Hydra's part, as in a job."""
    with initialize_config_module("lightning_lockstep.conf", version_base="1.3"):
        config = compose("lockstep_train", return_hydra_config=True)
    config.hydra.runtime.output_dir = "/runs/1"
    config.hydra.runtime.cwd = str(Path.cwd())
    config.hydra.job.name = "train"
    HydraConfig.instance().set_config(config)
    yield config
    HydraConfig.instance().cfg = None
    if hydra._written is not None:
        os.close(hydra._written[2])
    hydra._written = None


def test_interpolations_become_values_and_types_stay() -> None:
    frozen = freeze(OmegaConf.structured(Whole))
    assert frozen.twice == 3
    assert OmegaConf.get_type(frozen) is Whole
    assert OmegaConf.get_type(frozen.again) is Part
    assert OmegaConf.to_container(frozen, resolve=False)["many"] == [1, {"deep": 3}]  # type: ignore[index,call-overload]
    assert not OmegaConf.is_interpolation(frozen, "stamp")


def test_a_value_that_was_read_before_is_kept_and_other_ranks_get_a_copy(job: DictConfig) -> None:
    config = OmegaConf.structured(Whole)
    stamp = config.stamp
    assert freeze(config) is config and config.stamp == stamp
    assert for_other_ranks(job).trainer.default_root_dir == "/runs/1"
    assert OmegaConf.is_interpolation(job.trainer, "default_root_dir")


def test_what_cannot_be_resolved_is_left_to_whoever_reads_it() -> None:
    frozen = freeze(OmegaConf.structured(Whole))
    assert OmegaConf.is_missing(frozen, "later")
    assert OmegaConf.is_interpolation(frozen, "depends")
    assert OmegaConf.is_interpolation(frozen, "secret")


def test_hydras_own_part_is_frozen_though_it_is_read_only(job: DictConfig) -> None:
    frozen = freeze(job)
    assert frozen.trainer.default_root_dir == "/runs/1"
    assert frozen.hydra.job_logging.handlers.file.filename == "/runs/1/train.log"
    assert OmegaConf.is_readonly(frozen.hydra)
    assert "hydra" not in without_hydra(frozen)


def test_other_ranks_get_no_file_handler_and_no_folder(job: DictConfig) -> None:
    other = for_other_ranks(job)
    assert other.hydra.output_subdir is None
    assert list(other.hydra.job_logging.handlers) == ["console"]
    assert list(other.hydra.job_logging.root.handlers) == ["console"]
    assert other.hydra.runtime.output_dir == "/runs/1"


def test_the_command_reruns_this_program_on_a_private_file(
    job: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "program.py"
    script.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(script), "seed=1"])
    first, again = hydra_child_command(), hydra_child_command()
    assert first is not None
    command, folder = first
    assert first == again, "all ranks of a job share one file"
    assert command[0] == sys.executable
    assert command[-3:-1] == [str(script), "--experimental-rerun"]
    assert folder == str(Path.cwd())
    file = Path(command[-1])
    assert file.stat().st_mode & 0o077 == 0, "nobody else may read or write it"
    assert pickle.loads(file.read_bytes()).hydra.output_subdir is None
    read = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).hydra.job.name)"
    by_child = subprocess.run([sys.executable, "-c", read, file], capture_output=True, text=True, check=True)
    assert by_child.stdout == "train\n"
    if Path("/proc/self/fd").exists():
        assert not list(Path(tempfile.gettempdir()).glob("lockstep-config-*")), "no end can leave it behind"


def test_ranks_on_other_hosts_get_the_configuration_without_a_file(tmp_path: Path) -> None:
    config = tmp_path / "config.pickle"
    config.write_bytes(b"x" * 500_000)
    show = (
        "import os, sys; print(sys.argv[1:-1], open(sys.argv[-1]).read() == 'x' * 500_000, len(os.environ))"
    )
    program = [sys.executable, "-c", show, "a=1", "--experimental-rerun", str(config)]
    command, variables = config_for_all_hosts(program)
    assert str(config) not in command
    run = {"env": {**os.environ, **variables}, "capture_output": True, "text": True, "check": True}
    given = subprocess.run(command, **run).stdout  # type: ignore[call-overload]
    assert given == f"['a=1', '--experimental-rerun'] True {len(os.environ)}\n", "and the variable is gone"
    assert config_for_all_hosts(program[:4]) == (program[:4], {})
