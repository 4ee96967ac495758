"""The configuration that every rank gets."""

from __future__ import annotations

import base64
import importlib
import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.hydra import for_other_ranks, freeze, hydra_child_command

STRUCTURED = """
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

class Kind(Enum):
    A = 1
    B = 2

@dataclass
class Part:
    size: int = 3

@dataclass
class Mine:
    kind: Kind = Kind.A
    more: Any = 3
    part: Part = field(default_factory=Part)
"""


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


def test_another_rank_gets_the_configuration_without_a_file(
    job: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, pickle, sys\n"
        "from omegaconf import OmegaConf\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "config = pickle.load(open(sys.argv[2], 'rb'))\n"
        "print(sys.argv[1], config.hydra.job.name, config.hydra.output_subdir, len(os.environ))\n"
        "mine = config.mine\n"
        "print(OmegaConf.get_type(mine).__name__, repr(mine.kind), list(OmegaConf.missing_keys(mine)), mine.part)\n"
    )
    (tmp_path / "mine_structured.py").write_text(STRUCTURED)
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("mine_structured").Mine
    with open_dict(job):
        job.mine = OmegaConf.structured(mine(kind="B"))
        job.mine.more = "???"
    with open_dict(job.mine.part):
        job.mine.part.added = 5
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(script), "seed=1"])
    given = hydra_child_command()
    assert given is not None
    command, folder, variables = given
    assert folder == str(Path.cwd())
    for value in variables.values():
        values, *_ = json.loads(zlib.decompress(base64.b64decode(value)))
        assert OmegaConf.create(values).hydra.job.name == "train", "text, never a pickle"
    environ = {**os.environ, **variables}
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    first, second = said.splitlines()
    assert first == f"--experimental-rerun train None {len(os.environ)}", "and the variable is gone"
    assert second == "Mine <Kind.B: 2> ['mine.more'] {'size': 3, 'added': 5}", (
        "of the same class as on rank 0"
    )
    job.trainer.default_root_dir = os.urandom(100_000).hex()
    with pytest.raises(LaunchError, match="bytes when packed: expected at most 120,000"):
        hydra_child_command()
