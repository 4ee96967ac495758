"""Looks at command lines of `lockstep-train` without running them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lightning_lockstep._application.build import component_keys, constructor_faults
from lightning_lockstep._application.checks import check_training
from lightning_lockstep._application.configs import search_path_of
from lightning_lockstep._application.overrides import (
    Checked,
    as_current_job,
    check_command_line,
    read_arguments,
)
from lightning_lockstep.train import main


def look_at(*arguments: str, alone: bool = True) -> Checked:
    """What `lockstep-train` finds out about these arguments before it starts anything."""
    parsed = read_arguments(list(arguments))
    search_path = search_path_of(main, "pkg://lightning_lockstep.conf", parsed)
    return check_command_line(parsed, search_path, "lockstep_train", check_training, alone=alone)


def faults_of(*arguments: str) -> list[str]:
    """What `lockstep-train` finds wrong with these arguments before it starts anything, or else when it builds."""
    found, config = look_at(*arguments)[::2]
    if not found and config is not None:
        with as_current_job(config, 0):
            found = constructor_faults(config, component_keys(config))
    return [fault.text for fault in found]


def only(faults: list[str]) -> str:
    """The one fault there is."""
    assert len(faults) == 1, faults
    return faults[0]


#: `lockstep-train` as a module, and on two ranks of torchrun.
TRAIN = [sys.executable, "-m", "lightning_lockstep.train"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *TRAIN[1:],
]


def path_with(folder: Path) -> str:
    """Return `PYTHONPATH` with a folder of modules in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
