"""The one door through which every Lightning name comes; the stub next to it, `lightning.pyi`, lists them.

Lightning is published twice, as ``lightning`` (``lightning.pytorch``) and as ``pytorch_lightning``. Their
classes are distinct, and a Trainer accepts only those of the same family. So this module takes the family
that the program has already imported, and ``lightning`` where it has imported neither.

A test looks for each private name in both families.
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
