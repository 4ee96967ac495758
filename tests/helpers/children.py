"""What every process that a test starts gets in its environment."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

#: Holds the ``sitecustomize`` that hides from torchmetrics what it would import without need.
CHILD_SITE = Path(__file__).with_name("child_site")


def save_imports() -> None:
    """Hide optional packages from torchmetrics, in this process and in all that it starts."""
    spec = importlib.util.spec_from_file_location("child_site", CHILD_SITE / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.hide()
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(CHILD_SITE) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHILD_SITE), *path]))
