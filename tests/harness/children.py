"""What every process that a test starts gets in its environment."""

from __future__ import annotations

import os
from pathlib import Path

#: Holds the ``sitecustomize`` by which ranks run as forks and lines stay whole.
CHILD_SITE = Path(__file__).with_name("child_site")


def put_on_path(*folders: Path) -> None:
    """Have all Python processes that are started from here find it, and other folders, before what is installed."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    new = [folder for folder in map(str, (*folders, CHILD_SITE)) if folder not in path]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*new, *path]))
