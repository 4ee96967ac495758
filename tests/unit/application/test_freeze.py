"""The configuration that every rank gets."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.hydra import for_other_ranks, freeze, hydra_child_command


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


def test_a_configuration_that_is_too_large_for_the_environment_is_refused(
    job: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [__file__, "seed=1"])
    given = hydra_child_command()
    assert given is not None and given[1] == str(Path.cwd())
    job.trainer.default_root_dir = os.urandom(100_000).hex()
    with pytest.raises(LaunchError, match="bytes when packed: expected at most 120,000"):
        hydra_child_command()
