"""Helpers for tests that need real processes: ranks, user-like scripts, faults and leak detection.

Import from here: ``from tests.harness import run_ranks, run_script``.
"""

from pathlib import Path
from typing import Any

from tests.harness.device import chosen_device, leave_memory, on_device, wait_for_device
from tests.harness.logged import logged
from tests.harness.ports import reserve_port
from tests.harness.ranks import RankOutcome, kill_self, run_ranks, run_ranks_raw
from tests.harness.scripts import Script, ScriptOutcome, run_script, start_script

#: Models, fits and programs that tests of several costs share, a folder for each room.
MODELS = Path(__file__).parents[1] / "models"

#: Options of a Trainer that shows nothing and writes no file.
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)

__all__ = [
    "MODELS",
    "QUIET",
    "RankOutcome",
    "Script",
    "ScriptOutcome",
    "chosen_device",
    "kill_self",
    "leave_memory",
    "logged",
    "on_device",
    "reserve_port",
    "run_ranks",
    "run_ranks_raw",
    "run_script",
    "start_script",
    "wait_for_device",
]
