"""The one door through which every Lightning name comes; the stub next to it, `lightning.pyi`, lists them.

Lightning is published twice, as ``lightning`` (``lightning.pytorch``) and as ``pytorch_lightning``. Their
classes are distinct, and a Trainer accepts only those of the same family. So this module takes the family
that the program has already imported, and ``lightning`` where it has imported neither.

Each private name says here why it is needed; the private attributes and methods of Lightning's objects are in
:mod:`lightning_lockstep._doors.lightning_internals`. A test looks for each in both families, so that a new Lightning
release which moves one fails there and nowhere else.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any


def _chosen_family() -> tuple[str, str]:
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
        return "pytorch_lightning", "lightning_fabric"
    return "lightning.pytorch", "lightning.fabric"


PYTORCH, FABRIC = _chosen_family()

# name here -> why it is needed, for each name that Lightning keeps private
PRIVATE: dict[str, str] = {
    "_SubprocessScriptLauncher": "decides how ranks are started by running the program again; there is no public way",
    "_MultiProcessingLauncher": "decides how ranks are spawned or forked; there is no public way",
    "_GlobalStateSnapshot": "spawned ranks restore these globals as Lightning's own launcher does",
    "_check_bad_cuda_fork": "fork needs that CUDA was not initialized; Lightning checks it with this",
    "_check_missing_main_guard": "spawn needs a main guard in the script; Lightning checks it with this",
    "_basic_subprocess_cmd": "the command that runs this program again; one of our own would drift from Lightning's",
    "_destroy_dist_connection": "Lightning calls it at exit for nccl; after a failure it must not: it waits for peers",
    "_AcceleratorConnector": "turns fp16 on CPU into bf16; its frame still holds the arguments as the user gave them",
    "_convert_precision_to_unified_args": 'turns 16, "16", "bf16" and the like into the name that Lightning documents',
    "extract_batch_size": "counts the samples of a batch of any structure as Lightning does for its logged means",
    "_lightning_get_all_attr_holders": "finds a batch size in module, data module or hparams, in Lightning's order",
    "_set_sampler_epoch": "shuffles a loader for an epoch; which samplers it tells is Lightning's own rule",
    "_IndexBatchSamplerWrapper": "tells a BasePredictionWriter the samples of a batch; a loader is divided below it",
    "_AutomaticOptimization": "a batch that does not fit is run again within its step, which only this loop knows",
    "_ManualOptimization": "runs a step of a module with manual optimization apart from the run",
    "Closure": "the step, zero_grad and backward of one batch, as automatic optimization runs them",
    "ClosureResult": "what automatic optimization takes from a closure",
    "_TunerExitException": "ends a run that was only a search; the Trainer takes it for a success",
    # -- add further private names here and in the stub, each with the reason --
}


def _listed() -> dict[str, str]:
    """What the stub imports: name here -> family, module and name there, such as ``pytorch.callbacks.Checkpoint``."""
    found = {}
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_bytes()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            path = node.module.removeprefix("lightning.")
            found |= {alias.asname or alias.name: f"{path}.{alias.name}" for alias in node.names}
    return found


def _resolve(path: str) -> Any:
    family, _, rest = path.partition(".")
    module, _, name = rest.rpartition(".")
    root = PYTORCH if family == "pytorch" else FABRIC
    return getattr(importlib.import_module(f"{root}.{module}" if module else root), name)


NAMES = _listed()
globals().update({name: _resolve(path) for name, path in NAMES.items()})

__all__ = list(NAMES)
